"""MindSpeed-RL's throughput tables under four readings, and the paper's two mechanisms."""

import sys
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs
from rlkit.sim.study import Parameters, Plan, Row

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
MODELS = {
    "Qwen2.5-7B": ModelSpec.qwen25_7b(), "Qwen2.5-32B": ModelSpec.qwen25_32b(),
    "Qwen3-8B": ModelSpec.qwen3_8b(), "Qwen3-32B": ModelSpec.qwen3_32b(),
    "Qwen3-30B-A3B": ModelSpec.qwen3_30b_a3b(), "DeepSeek-R1-671B": ModelSpec.deepseek_r1_671b(),
}  # fmt: skip
PROMPT = 80  # tokens: 77.8 in the R1 run of cann-recipes-train
MEAN = {2048: 700, 1024: 600, 8192: 4000, 20480: 4000, 30720: 4000}  # by limit; all assumed
R1_MEAN = 1000  # of the plot in r1_zero_deepseek_671b.md: 515 to 1217
TRAIN = {  # layouts of configs/*.yaml; experts over TP x EP ranks (moe_tp_extend_ep)
    "grpo_7B_A3": Layout(tp=2, pp=2), "grpo_8B_A3": Layout(tp=2, pp=2),
    "grpo_32B_A3": Layout(tp=4, pp=4), "grpo_32B_A2": Layout(tp=4, pp=4),
    "grpo_R1_A3": Layout(tp=4, pp=8, ep=32, expert_tp=1),
    "dapo_30B-A3B_A3": Layout(tp=4, ep=8, expert_tp=1),
    "dapo_q32B_A3": Layout(tp=8, pp=2), "dapo_32B_A3_30k": Layout(tp=8, pp=2),
    "dapo_32B_A2_20k": Layout(tp=8, pp=2), "ppo_32B_A3": Layout(tp=8),
}  # fmt: skip
ENGINE = {  # of R1: a divisor of 384, assumed
    "grpo_32B_A3": Layout(tp=2), "grpo_32B_A2": Layout(tp=2), "dapo_q32B_A3": Layout(tp=8),
    "grpo_R1_A3": Layout(tp=4, ep=128, expert_tp=1),
    "dapo_30B-A3B_A3": Layout(ep=8, expert_tp=1),
    "dapo_32B_A3_30k": Layout(tp=4), "dapo_32B_A2_20k": Layout(tp=4), "ppo_32B_A3": Layout(tp=8),
}  # fmt: skip


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran. Read as: mean lengths, A3 numbers by card of two dies."""
    cell, limit = row["cell"], int(row["limit_tokens"])
    mean = R1_MEAN if cell == "grpo_R1_A3" else MEAN[limit]
    run = rk.sim.Run(
        model=MODELS[row["model"]],
        node=specs.NODE_A3 if row["machine"] == "A3" else specs.NODE_A2,
        num_devices=int(row["devices"]),
        workload=rk.sim.Workload(
            prompts=int(row["prompts"]),
            samples=int(row["samples"]),
            prompt_tokens=PROMPT,
            lengths=rk.sim.Lengths(mean_tokens=mean, sigma=parameters.sigma, limit_tokens=limit),
        ),
        generate=ENGINE.get(cell, Layout()),
        train=TRAIN[cell],
        minibatches=8 if limit > 10000 else 1,
        micro_batch_tokens=4096,
        forwards=2 if row["block"] == "GRPO" else 1,
        dock=rk.sim.central,
        reshard=rk.sim.allgather_swap,
        costs=parameters.costs(),
    )
    per_card = run.node.device.devices_per_card
    return Plan(run=run, schedule=rk.sim.synchronous(), scale=per_card)


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a cell."""
    import studies

    return studies.table(results)


if __name__ == "__main__":
    import studies

    studies.score(FOLDER, build, table)
