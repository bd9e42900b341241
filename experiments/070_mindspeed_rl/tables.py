"""More tables of 070's README: readings of the flags, the paper's mechanisms, 384 devices.

python experiments/070_mindspeed_rl/tables.py
"""

import math
import sys
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit import experiment
from rlkit.config import Layout
from rlkit.sim import specs
from rlkit.sim.study import Parameters, predict

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
import run as mindspeed  # noqa: E402
import studies  # noqa: E402

# log_max_throughput in each YAML; its default is true in the GRPO trainer, DAPO and PPO use means.
LONGEST = {"grpo_8B_A3", "grpo_R1_A3"}
FOUR = {  # the abstract's models: devices, trainer, engine; R1's are assumed
    "Qwen2.5-7B": (16, Layout(tp=2, pp=2), Layout()),
    "Qwen2.5-32B": (16, Layout(tp=4, pp=4), Layout(tp=2)),
    "Qwen3-30B-A3B": (16, Layout(tp=4, ep=8, expert_tp=1), Layout(ep=8, expert_tp=1)),
    "DeepSeek-R1-671B": (384, mindspeed.TRAIN["grpo_R1_A3"], mindspeed.ENGINE["grpo_R1_A3"]),
}  # fmt: skip


def readings(parameters: Parameters) -> pd.DataFrame:
    """Ratio simulated / published: which lengths are counted, and whether A3 is by die or card."""
    rows = []
    for row in studies.cells(FOLDER):
        plan = mindspeed.build(row, parameters)
        value = predict(row, mindspeed.build, parameters) / plan.scale / float(row["value"])
        mean, limit = plan.run.moments[0], int(row["limit_tokens"]) + mindspeed.PROMPT
        longest = limit / mean if row["cell"] in LONGEST else 1.0
        kind = {"mean lengths": 1.0, "flags of the YAML": longest}
        cut = {"die": 1.0, "card": plan.scale}
        rows.append(
            {"cell": row["cell"], "published": row["value"]}
            | {
                f"{lengths}, by {part}": f"{value * a * b:.2f}"
                for lengths, a in kind.items()
                for part, b in cut.items()
            }
        )
    return pd.DataFrame(rows)


def step(
    parameters: Parameters, model: str, devices: int, *, steps: int = 3, **moves: object
) -> rk.sim.Simulation:
    """A synchronous step of a model of the abstract, 64 prompts x 16 responses a 16 devices."""
    _, train, engine = FOUR[model]
    lengths = rk.sim.Lengths(mean_tokens=1000, sigma=parameters.sigma, limit_tokens=2048)
    run = rk.sim.Run(
        model=mindspeed.MODELS[model],
        node=specs.NODE_A3,
        num_devices=devices,
        workload=rk.sim.Workload(
            prompts=4 * devices, samples=16, prompt_tokens=mindspeed.PROMPT, lengths=lengths
        ),
        generate=engine,
        train=train,
        micro_batch_tokens=4096,
        forwards=2,
        costs=parameters.costs(),
        **moves,
    )
    return rk.sim.simulate(run, rk.sim.synchronous(), steps=steps)


def mechanisms(parameters: Parameters) -> pd.DataFrame:
    """A central store and naive resharding against warehouses and allgather-swap."""
    rows = []
    for model, (devices, *_) in FOUR.items():
        old = step(parameters, model, devices, dock=rk.sim.central, reshard=rk.sim.naive)
        new = step(
            parameters, model, devices, dock=rk.sim.distributed, reshard=rk.sim.allgather_swap
        )
        kept = old.memory.generate["weights"] - new.memory.generate["weights"]
        rows.append(
            {
                "model": model,
                "devices": devices,
                "central + naive, s": f"{old.step_s:.1f}",
                "of that the store, s": f"{old.mean('time/dock_s'):.1f}",
                "dock + swap, s": f"{new.step_s:.1f}",
                "ratio": f"{old.step_s / new.step_s:.2f}",
                "GiB a device freed in generation": f"{kept / 2**30:.2f}",
            }
        )
    return pd.DataFrame(rows)


def scaling(parameters: Parameters) -> pd.DataFrame:
    """R1 from 256 to 384 devices, work in proportion; 1 is linear."""
    rows, first = [], {"central": math.nan, "dock": math.nan}
    for devices in (256, 384):
        row: dict = {"devices": devices}
        for name, dock in (("central", rk.sim.central), ("dock", rk.sim.distributed)):
            found = step(
                parameters, "DeepSeek-R1-671B", devices, dock=dock, reshard=rk.sim.allgather_swap
            )
            rate = found.tokens_per_s_per_device
            first[name] = rate if devices == 256 else first[name]
            row |= {
                f"{name}, tokens/s/device": f"{rate:.1f}",
                f"{name}, linearity": f"{rate / first[name]:.2f}",
            }
            row |= {"out of memory": found.out_of_memory or "no"}
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    parameters = Parameters(**studies.read_fit()["parameters"])
    for make in (readings, mechanisms, scaling):
        print(f"\n{make.__doc__}\n\n{experiment.markdown(make(parameters))}")
