"""What verl's tables were run with: models, layouts, lengths."""

from rlkit.config import Layout, ModelSpec
from rlkit.sim.study import Row

MODELS = {
    "7B": ModelSpec.qwen25_7b(),
    "30B-A3B": ModelSpec.qwen3_30b_a3b(),
    "235B-A22B": ModelSpec.qwen3_235b_a22b(),
}
PROMPT, LIMIT = 150, 28672  # tokens; assumed, and the limit of the runs that are fitted
PROMPTS_A_MINIBATCH = {"7B": 32, "30B-A3B": 128, "235B-A22B": 128}
ULYSSES = 4  # trainers that share a sequence


def layouts(row: Row, mean: float) -> tuple[Layout, Layout, int]:
    """Engine, trainer, and tokens of a rank's micro-batch, of the scripts in verl's recipes.

    FSDP: twice the longest sequence a device. Megatron: two sequences of ``mean`` tokens; the
    mixture one longest sequence a device. Engines beside a Megatron trainer, or one step off, have
    a tp of 2.
    """
    longest = 2048 + int(row["limit_tokens"])
    if row["model"] != "7B":
        return Layout(tp=4), Layout(tp=2, cp=2, ep=8, expert_tp=1), 2 * longest
    megatron = row["note"] == "megatron"
    engine = Layout(tp=2 if megatron or row["system"] == "one_step_off" else 4)
    if megatron:
        return engine, Layout(tp=2, pp=2), int(2 * (PROMPT + mean))
    return engine, Layout(cp=ULYSSES), 2 * ULYSSES * longest
