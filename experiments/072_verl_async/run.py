"""verl's tables of colocated and asynchronous runs, simulated. README: what is compared and how."""

import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit.sim import specs
from rlkit.sim.study import Parameters, Plan, Row

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
sys.path.insert(0, str(FOLDER))


def build(row: Row, parameters: Parameters) -> Plan:
    """What a row of paper.csv ran: 512 prompts x 16 responses a step, 12 if one step off."""
    import verl_facts as facts

    lengths = rk.sim.Lengths(
        mean_tokens=parameters.dapo_tokens, sigma=parameters.sigma, limit_tokens=facts.LIMIT
    ).cut(int(row["limit_tokens"]))
    system, mixture = row["system"], row["model"] != "7B"
    workload = rk.sim.Workload(
        prompts=512,
        samples=12 if system == "one_step_off" else 16,
        prompt_tokens=facts.PROMPT,
        lengths=lengths,
    )
    engine, trainer, micro_batch_tokens = facts.layouts(row, lengths.mean_tokens)
    run = rk.sim.Run(
        model=facts.MODELS[row["model"]],
        node=specs.NODE_H20,
        num_devices=int(row["devices"]),
        rollout_devices=int(row["rollout"]),
        workload=workload,
        generate=engine,
        train=trainer,
        sharded=trainer.cp == facts.ULYSSES,
        minibatches=512 // facts.PROMPTS_A_MINIBATCH[row["model"]],
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
