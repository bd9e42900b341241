"""verl's tables of colocated and asynchronous runs, simulated. README: what is compared and how."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs
from rlkit.sim.study import Parameters, Plan, Row

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
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


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran: 512 prompts x 16 responses a step, 12 if one step off."""
    lengths = rk.sim.Lengths(
        mean_tokens=parameters.dapo_tokens, sigma=parameters.sigma, limit_tokens=LIMIT
    ).cut(int(row["limit_tokens"]))
    system, mixture = row["system"], row["model"] != "7B"
    workload = rk.sim.Workload(
        prompts=512,
        samples=12 if system == "one_step_off" else 16,
        prompt_tokens=PROMPT,
        lengths=lengths,
    )
    engine, trainer, micro_batch_tokens = layouts(row, lengths.mean_tokens)
    run = rk.sim.Run(
        model=MODELS[row["model"]],
        node=specs.NODE_H20,
        num_devices=int(row["devices"]),
        rollout_devices=int(row["rollout"]),
        workload=workload,
        generate=engine,
        train=trainer,
        sharded=trainer.cp == ULYSSES,
        minibatches=512 // PROMPTS_A_MINIBATCH[row["model"]],
        micro_batch_tokens=micro_batch_tokens,
        chunks=int(system.removeprefix("async")) if system.startswith("async") else 1,
        # Asynchronous runs use the engine's logprobs; 30B-A3B has a reference as well.
        forwards=(0 if system.startswith("async") else 1) + mixture,
        reshard=rk.sim.allgather_swap if not int(row["rollout"]) else rk.sim.broadcast,
        costs=replace(parameters.costs(), memory_share=0.7 if mixture else 0.8),
    )
    schedule = rk.sim.synchronous()
    if system == "one_step_off":
        schedule = rk.sim.one_step_off()
    elif system.startswith("async"):
        schedule = rk.sim.asynchronous(max_staleness=float(row["staleness"]))
    return Plan(run=run, schedule=schedule)


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a cell."""
    import studies

    return studies.table(results)


if __name__ == "__main__":
    import studies

    studies.score(FOLDER, build, table)
