"""What simulating costs: seconds for 100 train steps of 384 devices.

    python benchmarks/simulate.py

One process, one thread. Processor time is what other jobs touch less. The aim is 30 s a run.
"""

import argparse
import time

import pandas as pd

from rlkit import sim
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs

GOAL_S = 30.0


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


def main() -> None:
    """Time both runs."""
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


if __name__ == "__main__":
    main()
