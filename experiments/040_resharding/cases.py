"""Models and layouts whose plans are compared, and the config of the measured runs."""

from dataclasses import dataclass

from rlkit.config import Layout, ModelSpec

R1 = ModelSpec.deepseek_r1_671b()
PLANNED = {
    "Qwen2.5-7B": (ModelSpec.qwen25_7b(), Layout(tp=2, pp=2), Layout(), 16),
    "Qwen2.5-32B": (
        ModelSpec.qwen25_32b(), Layout(tp=4, pp=4, stages=(16, 17, 16, 15)), Layout(tp=2), 16),
    "Qwen2.5-32B, 32k": (ModelSpec.qwen25_32b(), Layout(tp=8, pp=2, cp=2), Layout(tp=4), 64),
    "Qwen3-30B-A3B": (
        ModelSpec.qwen3_30b_a3b(), Layout(tp=4, ep=8, expert_tp=1),
        Layout(ep=8, expert_tp=1), 16),
    "DeepSeek-R1 671B": (
        R1, Layout(tp=4, pp=8, ep=32, expert_tp=1, stages=(7, 7, 8, 8, 8, 8, 8, 7)),
        Layout(tp=4, ep=256, expert_tp=1), 256),
    "DeepSeek-R1 671B, assumed": (
        R1, Layout(tp=4, pp=12, ep=32, expert_tp=1), Layout(tp=4, ep=128, expert_tp=1), 384),
}  # fmt: skip
"""(model, train, infer, dies): of configs/ in MindSpeed RL's repository but for the assumed one.

Their experts lie over TP x EP ranks (moe_tp_extend_ep), so EP8 with TP4 is ep=32 with expert_tp=1.
"""
MEASURED = (Layout(tp=2, pp=2), Layout())
RANKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Size of the measured runs."""

    mib: int = 192
    """Of the model, in bf16."""
    repeats: int = 5
    """Timed reshards a strategy, after one that is not."""
    bucket_mib: float = 16
    """Size of buckets."""


def small(mib: float) -> ModelSpec:
    """The shape of a Qwen2 of at most ``mib`` MiB in bf16, eight layers deep."""

    def wide(width: int) -> ModelSpec:
        return ModelSpec(
            vocab_size=12 * width, hidden_size=width, intermediate_size=4 * width, num_layers=8,
            num_heads=8, num_kv_heads=4, head_dim=width // 8, qkv_bias=True,
        )  # fmt: skip

    fitting = (w for w in range(64, 8192, 64) if 2 * wide(w).num_parameters <= mib * 2**20)
    return wide(max(fitting))
