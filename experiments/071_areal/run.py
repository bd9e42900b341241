"""AReaL's throughput tables (arXiv 2505.24298), simulated. README: what is compared and how."""

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
    "1.5B": ModelSpec.qwen25_1_5b(),
    "7B": ModelSpec.qwen25_7b(),
    "14B": ModelSpec.qwen25_14b(),
    "32B": ModelSpec.qwen25_32b(),
}
# Engines and trainers of the legacy benchmark (tag v0.3.1) and of the blog (14B).
ENGINE = {"1.5B": 1, "7B": 1, "14B": 4, "32B": 8}
TRAIN = {
    "1.5B": Layout(pp=2),
    "7B": Layout(pp=4),
    "14B": Layout(pp=8, tp=2),
    "32B": Layout(pp=8, tp=2),
}
SEQUENCE, PROMPT, LIMIT = 9276, 200, 27648  # tokens; the first follows from Fig. 5c and Table 1


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran."""
    code = row["block"] == "Table 1" and row["model"] in ("14B", "32B")
    mean = parameters.code_tokens if code else SEQUENCE - PROMPT
    lengths = rk.sim.Lengths(mean_tokens=mean, sigma=parameters.sigma, limit_tokens=LIMIT)
    workload = rk.sim.Workload(
        prompts=64 if row["block"] == "Table 7" else 512,
        samples=16,
        prompt_tokens=PROMPT,
        lengths=lengths.cut(int(row["limit_tokens"])),
    )
    verl = row["system"] == "verl"
    run = rk.sim.Run(
        model=MODELS[row["model"]],
        node=specs.NODE_H800,
        num_devices=int(row["devices"]),
        rollout_devices=int(row["rollout"]),
        workload=workload,
        generate=Layout(tp=ENGINE[row["model"]]),
        train=Layout() if verl else TRAIN[row["model"]],
        sharded=verl,
        minibatches=4,
        reshard=rk.sim.allgather_swap if verl else rk.sim.through_storage,
        costs=parameters.costs(),
    )
    schedule = rk.sim.synchronous()
    if row["system"] in ("areal", "wait"):
        schedule = rk.sim.asynchronous(
            max_staleness=min(32.0, float(row["staleness"])), interrupt=row["system"] == "areal"
        )
    scale = 1 / parameters.areal_scale if str(row["block"]).startswith("Fig. 4") else 1.0
    return Plan(run=run, schedule=schedule, scale=scale)


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a cell."""
    import studies

    return studies.table(results)


if __name__ == "__main__":
    import studies

    studies.score(FOLDER, build, table)
