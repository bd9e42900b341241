"""Small runs that the simulator's tests share."""

from dataclasses import replace

import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.sim import specs

LENGTHS = sim.Lengths(mean_tokens=1000, sigma=0.8, limit_tokens=8192)
WORKLOAD = sim.Workload(prompts=32, samples=4, prompt_tokens=100, lengths=LENGTHS)


def small_run(**changes):
    """Qwen2.5-1.5B on 16 H100, 12 of which generate."""
    run = sim.Run(
        model=ModelSpec.qwen25_1_5b(), node=specs.NODE_H100, num_devices=16, rollout_devices=12,
        workload=WORKLOAD, train=Layout(pp=2), reshard=sim.broadcast,
    )  # fmt: skip
    return replace(run, **changes)


def shared_run(**changes):
    """The same with devices that take turns."""
    return small_run(**{"rollout_devices": 0, "reshard": sim.allgather_swap} | changes)
