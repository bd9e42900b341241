"""AReaL's throughput tables (arXiv 2505.24298), simulated. README: what is compared and how."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit.config import Layout
from rlkit.sim import specs
from rlkit.sim.study import Parameters, Plan, Row

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
sys.path.insert(0, str(FOLDER))


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran."""
    import areal_facts as facts

    verl, limit = row["system"] == "verl", int(row["limit_tokens"])
    code = row["block"] == "Table 1" and row["model"] in ("14B", "32B")
    mean = parameters.code_tokens if code else facts.SEQUENCE - facts.PROMPT
    lengths = rk.sim.Lengths(mean_tokens=mean, sigma=parameters.sigma, limit_tokens=facts.LIMIT)
    workload = rk.sim.Workload(
        prompts=64 if row["block"] == "Table 7" else 512,
        samples=16,
        prompt_tokens=facts.PROMPT,
        lengths=lengths.cut(limit),
    )
    tp, memory_share = facts.ENGINE["verl" if verl else "areal"][row["model"]]
    # A micro-batch of verl's trainer holds the longest sequence, prompts of up to 1,024 included.
    budget = max(24_576 if row["model"] == "32B" else 32_768, 1024 + limit)
    run = rk.sim.Run(
        model=facts.MODELS[row["model"]],
        node=specs.NODE_H800,
        num_devices=int(row["devices"]),
        rollout_devices=int(row["rollout"]),
        workload=workload,
        generate=Layout(tp=tp),
        train=Layout() if verl else facts.TRAIN[row["model"]],
        sharded=verl,
        minibatches=4,
        micro_batch_tokens=budget if verl else 32_768,
        forwards=1 + verl,  # verl's scripts have a reference policy as well
        reshard=rk.sim.allgather_swap if verl else rk.sim.through_storage,
        costs=replace(parameters.costs(), memory_share=memory_share),
    )
    schedule, benchmark = rk.sim.synchronous(), str(row["block"]).startswith("Fig. 4")
    if row["system"] in ("areal", "wait"):
        schedule = rk.sim.asynchronous(
            max_staleness=min(32.0, float(row["staleness"])),
            interrupt=row["system"] == "areal",
            max_running=facts.MOST_RUNNING if benchmark else None,
        )
    scale = 1 / parameters.areal_scale if benchmark else 1.0
    return Plan(run=run, schedule=schedule, scale=scale)


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a cell."""
    import studies

    return studies.table(results)


if __name__ == "__main__":
    import studies

    studies.score(FOLDER, build, table)
