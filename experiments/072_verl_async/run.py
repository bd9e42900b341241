"""verl's tables of colocated and asynchronous runs, simulated. README: what is compared and how."""

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
    "7B": ModelSpec.qwen25_7b(),
    "30B-A3B": ModelSpec.qwen3_30b_a3b(),
    "235B-A22B": ModelSpec.qwen3_235b_a22b(),
}
PROMPT, LIMIT = 150, 28672  # tokens; assumed, and the limit of the runs that are fitted
PROMPTS_A_MINIBATCH = {"7B": 32, "30B-A3B": 128, "235B-A22B": 128}


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran: 512 prompts x 16 responses a step."""
    lengths = rk.sim.Lengths(
        mean_tokens=parameters.dapo_tokens, sigma=parameters.sigma, limit_tokens=LIMIT
    )
    workload = rk.sim.Workload(
        prompts=512,
        samples=16,
        prompt_tokens=PROMPT,
        lengths=lengths.cut(int(row["limit_tokens"])),
    )
    system, mixture = row["system"], row["model"] != "7B"
    fsdp = not mixture and row["note"] != "megatron"
    layout = Layout(tp=2, pp=2) if not mixture else Layout(tp=4, ep=8)  # Megatron's; assumed
    run = rk.sim.Run(
        model=MODELS[row["model"]],
        node=specs.NODE_H20,
        num_devices=int(row["devices"]),
        rollout_devices=int(row["rollout"]),
        workload=workload,
        generate=Layout(tp=4) if mixture else Layout(),
        train=Layout() if fsdp else layout,
        sharded=fsdp,
        minibatches=512 // PROMPTS_A_MINIBATCH[row["model"]],
        chunks=int(system.removeprefix("async")) if system.startswith("async") else 1,
        # Asynchronous runs use the engine's logprobs; 30B-A3B has a reference as well.
        forwards=(0 if system.startswith("async") else 1) + mixture,
        reshard=rk.sim.allgather_swap if not int(row["rollout"]) else rk.sim.broadcast,
        costs=parameters.costs(),
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
