"""Runs on a virtual clock: what a schedule, a layout and some devices would take, and why.

Everything here is arithmetic: no device. Peaks have sources (``specs``), the rest is
fitted or assumed (``Costs``). The frames are those of a real run, so ``rk.viz`` draws both.
"""

from rlkit.checks import instance, whole
from rlkit.sim import cost, memory, moves, specs
from rlkit.sim.calibrate import fit
from rlkit.sim.events import Loop, Schedule, asynchronous, one_step_off, synchronous
from rlkit.sim.lengths import Lengths
from rlkit.sim.moves import (
    allgather_swap,
    broadcast,
    central,
    distributed,
    fixed,
    naive,
    through_storage,
)
from rlkit.sim.result import Simulation, collect, constants
from rlkit.sim.sweep import change, layouts, splits, stalenesses, sweep
from rlkit.sim.work import FITTED, Costs, Run, Workload

__all__ = [
    "FITTED",
    "Costs",
    "Lengths",
    "Run",
    "Schedule",
    "Simulation",
    "Workload",
    "allgather_swap",
    "asynchronous",
    "broadcast",
    "central",
    "change",
    "constants",
    "cost",
    "distributed",
    "fit",
    "fixed",
    "layouts",
    "memory",
    "moves",
    "naive",
    "one_step_off",
    "simulate",
    "specs",
    "splits",
    "stalenesses",
    "sweep",
    "synchronous",
    "through_storage",
]  # fmt: skip


def simulate(
    run: Run, schedule: Schedule, *, steps: int | None = None, seed: int = 0
) -> Simulation:
    """Run ``steps`` train steps on a virtual clock; the same seed gives the same numbers.

    steps: by default ``schedule.steady_steps``. In fewer, an asynchronous trainer takes the groups
    that end first, so the short ones, and lives on what was generated before it began: a split of
    devices then looks up to a third quicker than it stays.

    A run that does not fit into memory is a result, too: ``out_of_memory`` says where. Devices
    that make no whole engine or trainer idle.
    """
    instance("run", run, Run)
    instance("schedule", schedule, Schedule)
    steps = schedule.steady_steps if steps is None else whole("steps", steps)
    whole("seed", seed, least=0)
    room = memory.memory(run)
    if room.problem:
        return collect(run, room, None, warm_up=0)
    loop = Loop(run, schedule, room, seed=seed)
    warm_up = int(min(steps // 2, schedule.warm_up))
    return collect(run, room, loop.play(steps), warm_up=warm_up)
