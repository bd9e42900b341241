"""Many runs as one table: what a split, a layout or a bound on staleness would change."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from rlkit.checks import did_you_mean, instance
from rlkit.config import Layout
from rlkit.sim.events import Schedule
from rlkit.sim.memory import GIB
from rlkit.sim.result import Simulation
from rlkit.sim.work import Run

RUN, SCHEDULE = ({item.name for item in fields(cls)} for cls in (Run, Schedule))
PARTS = ("workload", "costs", "node")
"""Fields of a run that have fields."""


def change(run: Run, schedule: Schedule, **values: Any) -> tuple[Run, Schedule]:
    """The run and the schedule with other values of some of their fields."""
    unknown = sorted(set(values) - RUN - SCHEDULE)
    if unknown:
        name, known = unknown[0], RUN | SCHEDULE
        part = next((part for part in PARTS if hasattr(getattr(run, part), name)), None)
        inside = f" Pass {part}=replace(run.{part}, {name}=...)." if part else ""
        raise ValueError(
            f"change: got {unknown}, need fields of Run or Schedule: {', '.join(sorted(known))}."
            f"{inside or did_you_mean(name, known)}"
        )
    here = replace(run, **{name: value for name, value in values.items() if name in RUN})
    order = replace(schedule, **{n: value for n, value in values.items() if n in SCHEDULE})
    return here, order


def sweep(
    run: Run,
    schedule: Schedule,
    over: Mapping[str, Sequence[Any]],
    *,
    steps: int | None = None,
    seed: int = 0,
) -> Any:
    """DataFrame, a row a combination: the fields of ``over``, then what came out.

    ``over`` names fields of the run or of the schedule: ``{"rollout_devices": [64, 96],
    "max_staleness": [1, 4]}``. Combinations that do not fit have a reason in ``out_of_memory``.
    ``trainer_waits`` is a share of the step, ``staleness_steps`` a mean over groups. Compare
    asynchronous runs by ``tokens_per_s``: their steps train samples of other lengths.
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    instance("over", over, Mapping)
    for name, values in over.items():
        if isinstance(values, str) or not hasattr(values, "__len__") or not len(values):
            raise ValueError(f"over: got {name}={values!r}, need a list of one value or more.")
    points = [dict(zip(over, values, strict=True)) for values in product(*over.values())]
    runs = [change(run, schedule, **point) for point in points]  # a wrong one ends it at once
    if steps is None:  # as many for all, so that they see the same responses
        steps = max(order.steady_steps for _, order in runs)
    found = [_outcome(*each, steps=steps, seed=seed) for each in runs]
    return pd.DataFrame([a | b for a, b in zip(points, found, strict=True)])


def _outcome(run: Run, schedule: Schedule, *, steps: int, seed: int) -> dict[str, Any]:
    from rlkit.sim import simulate

    found = simulate(run, schedule, steps=steps, seed=seed)
    return {
        "step_s": found.step_s,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_device": found.tokens_per_s_per_device,
        "trainer_waits": found.mean("time/generate_s") / found.step_s,
        "staleness_steps": found.mean("staleness/head_steps"),
        "peak_gib": _peak_bytes(found) / GIB,
        "out_of_memory": found.out_of_memory,
    }


def _peak_bytes(found: Simulation) -> float:
    phases = found.memory.generate, found.memory.update
    return max(sum(size for n, size in each.items() if n != "host_swap") for each in phases)


def splits(run: Run, schedule: Schedule, *, steps: int | None = None, seed: int = 0) -> Any:
    """Every split of the devices into whole engines and whole trainers, most tokens/s first."""
    engine, trainer = run.generate.num_devices, run.train.num_devices
    counts = range(engine, run.num_devices, engine)
    counts = [count for count in counts if (run.num_devices - count) % trainer == 0]
    if not counts:
        raise ValueError(
            f"splits: got {run.num_devices} devices for engines of {engine} and trainers of "
            f"{trainer}, need room for one of each, and devices left over for none."
        )
    return _best(sweep(run, schedule, {"rollout_devices": counts}, steps=steps, seed=seed))


def layouts(run: Run, schedule: Schedule, *, steps: int | None = None, seed: int = 0) -> Any:
    """Every engine (tp) and trainer (tp, pp) of powers of two, most tokens/s first.

    tp stays inside a node. Those that do not fit the memory come last, with the reason.
    """
    inside = [tp for tp in _powers(run.node.num_devices) if run.model.num_heads % tp == 0]
    train = [
        Layout(tp=tp, pp=pp)
        for tp in inside
        for pp in _powers(run.model.num_layers)
        if run.train_devices % (tp * pp) == 0
    ]
    engines = [Layout(tp=tp) for tp in inside]
    over = {"generate": engines, "train": train}
    return _best(sweep(run, schedule, over, steps=steps, seed=seed))


def stalenesses(
    run: Run, schedule: Schedule, bounds: Sequence[float] = (0, 1, 2, 4, 8), *, seed: int = 0
) -> Any:
    """A row a bound, in order: what each more step of staleness buys."""
    return sweep(run, schedule, {"max_staleness": list(bounds)}, seed=seed)


def _best(frame: Any) -> Any:
    by = {"by": "tokens_per_s", "ascending": False, "kind": "stable"}
    return frame.sort_values(**by, na_position="last", ignore_index=True)


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
