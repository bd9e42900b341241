"""What simulating costs: seconds for 100 train steps of 384 devices, and for a slider to redraw.

    python benchmarks/simulate.py

One process, one thread. Processor time is what other jobs touch less. The aim is 30 s a run, and
1 s a move of a slider: notebook 11's run, simulated and drawn again.
"""

import argparse
import time

import pandas as pd

from rlkit import sim, viz
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs

GOAL_S, REDRAW_GOAL_S = 30.0, 1.0


def runs(devices: int) -> dict[str, tuple[sim.Run, sim.Schedule]]:
    """DeepSeek-R1 in turns on dies of the 910C, and Qwen2.5-32B asynchronously on H800."""
    short = sim.Lengths(mean_tokens=1000, sigma=1.0, limit_tokens=2048)
    long = sim.Lengths(mean_tokens=9000, sigma=1.0, limit_tokens=27_648)
    turns = sim.Run(
        model=ModelSpec.deepseek_r1_671b(), node=specs.NODE_A3, num_devices=devices,
        workload=sim.Workload(prompts=devices, samples=32, prompt_tokens=1024, lengths=short),
        generate=Layout(tp=4, ep=128, expert_tp=1),
        train=Layout(tp=4, pp=12, ep=32, expert_tp=1),
        micro_batch_tokens=4096, dock=sim.distributed, reshard=sim.allgather_swap,
    )  # fmt: skip
    beside = sim.Run(
        model=ModelSpec.qwen25_32b(), node=specs.NODE_H800, num_devices=devices,
        rollout_devices=devices * 3 // 4,
        workload=sim.Workload(prompts=512, samples=16, prompt_tokens=200, lengths=long),
        generate=Layout(tp=8), train=Layout(tp=2, pp=8), reshard=sim.through_storage,
    )  # fmt: skip
    return {
        "DeepSeek-R1, in turns": (turns, sim.synchronous()),
        "Qwen2.5-32B, asynchronous": (beside, sim.asynchronous(max_staleness=4)),
    }


def redraws() -> pd.DataFrame:
    """A row a move of a slider of ``WhatIf``: seconds to simulate six steps and to draw them."""
    lengths = sim.Lengths(mean_tokens=9076, sigma=1.01, limit_tokens=27_648)
    run = sim.Run(
        model=ModelSpec.qwen25_1_5b(), node=specs.NODE_H800, num_devices=32, rollout_devices=24,
        workload=sim.Workload(prompts=128, samples=16, prompt_tokens=200, lengths=lengths),
        train=Layout(pp=2), minibatches=4, reshard=sim.through_storage,
    )  # fmt: skip
    schedule, parts = sim.asynchronous(max_staleness=4), []

    def what_if(**fields):
        start_s = time.process_time()
        found = sim.simulate(*sim.change(run, schedule, **fields), steps=6)
        parts.append(time.process_time() - start_s)
        return found

    over = {"rollout_devices": [24, 20, 16, 12], "max_staleness": [4, 2, 1, 0]}
    view, rows = viz.WhatIf(what_if, over), []
    for name, values in over.items():
        for value in values:
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            view.choose(**{name: value})
            wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            row = {"moved": f"{name}={value}", "simulated cpu_s": parts[-1]}
            row |= {"drawn cpu_s": cpu_s - parts[-1], "cpu_s": cpu_s, "wall_s": wall_s}
            rows.append(row | {f"cpu within {REDRAW_GOAL_S:.0f} s": cpu_s < REDRAW_GOAL_S})
    return pd.DataFrame(rows)


def main() -> None:
    """Time both runs, and the moves of sliders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=384)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    rows = []
    for name, (run, schedule) in runs(args.devices).items():
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        found = sim.simulate(run, schedule, steps=args.steps)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        assert not found.out_of_memory, found
        row = {"run": name, "devices": args.devices, "steps": len(found.log), "wall_s": wall_s}
        rows.append(
            row
            | {
                "cpu_s": cpu_s,
                f"cpu within {GOAL_S:.0f} s": cpu_s < GOAL_S,
                "simulated_s": found.step_s,
            }
        )
    print(pd.DataFrame(rows).round(1).to_string(index=False))
    print(redraws().round(2).to_string(index=False))


if __name__ == "__main__":
    main()
