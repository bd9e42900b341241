"""Published numbers against simulated ones: predictions, a fit of few parameters, errors.

A study is a ``paper.csv`` and a function that says what each of its rows ran. Which rows a fit may
see, and which are left out and why, is written down before the others are scored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from rlkit.checks import instance
from rlkit.sim import cost
from rlkit.sim.events import Schedule
from rlkit.sim.result import Simulation
from rlkit.sim.work import Costs, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Everything that is fitted, for all studies together: eight numbers."""

    train_bytes_per_flop: float = 5.0e-3
    """See ``Costs``."""
    decode_overhead_s: float = 6.0e-3
    """See ``Costs``."""
    trainer_s_per_sequence: float = 5.0e-3
    """See ``Costs``."""
    slow_software: float = 1.5
    """See ``Costs``."""
    sigma: float = 0.8
    """Of all families of lengths (``Lengths.sigma``)."""
    code_tokens: float = 12_000.0
    """Mean response of AReaL's code runs."""
    dapo_tokens: float = 2_000.0
    """Mean response of verl's DAPO runs."""
    areal_scale: float = 3.5
    """What the scale of AReaL's Fig. 4 differs by from that of its Table 1 and Fig. 5c."""

    def costs(self) -> Costs:
        """The software's rates."""
        return Costs(
            train_bytes_per_flop=self.train_bytes_per_flop,
            decode_overhead_s=self.decode_overhead_s,
            trainer_s_per_sequence=self.trainer_s_per_sequence,
            slow_software=self.slow_software,
        )


BOUNDS: Mapping[str, tuple[float, float]] = {
    "train_bytes_per_flop": (5e-4, 3e-2),
    "decode_overhead_s": (1e-3, 4e-2),
    "trainer_s_per_sequence": (1e-4, 3e-2),
    "slow_software": (1.0, 8.0),
    "sigma": (0.3, 1.3),
    "code_tokens": (6_000.0, 18_000.0),
    "dapo_tokens": (500.0, 8_000.0),
    "areal_scale": (1.0, 8.0),
}
"""Where a fit may look: what is plausible for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a row of a paper.csv ran."""

    run: Run
    schedule: Schedule
    scale: float = 1.0
    """What the simulated value is multiplied by to be on the publication's scale."""


TRAINER_RATE = "throughput/update_tflops_per_s_per_device"
"""Metric of a row that tells of the trainer alone."""

Row = Mapping[str, Any]
"""A row of a paper.csv."""
Build = Callable[[Row, Parameters], Plan]
"""What each row ran, given the parameters."""


@lru_cache(maxsize=64)
def played(run: Run, schedule: Schedule, seed: int) -> Simulation:
    """A run in its steady state: the steps that fill the pipeline, and four more."""
    from rlkit.sim import simulate

    steps = int(schedule.warm_up) + 4 + (schedule.max_staleness > 0)
    return simulate(run, schedule, steps=steps, seed=seed)


def trainer_rate(run: Run) -> float:
    """Operations a second of one trainer while it updates, those of the recomputation counted."""
    sequences = run.workload.sequences
    tokens, squares = (sequences * each for each in run.moments)
    passes = 4.0 if run.recompute else 3.0
    seconds = cost.update(run, tokens, squares, sequences).seconds
    return passes * cost.forward_flops(run.model, tokens, squares) / run.train_devices / seconds


def predict(row: Row, build: Build, parameters: Parameters, *, seed: int = 0) -> float:
    """A row's metric as simulated; NaN where the run is out of memory."""
    plan = instance("build(row, parameters)", build(row, parameters), Plan)
    if row["metric"] == TRAINER_RATE:
        return plan.scale * trainer_rate(plan.run) / 1e12
    simulation = played(plan.run, plan.schedule, seed)
    if row["metric"] == "throughput/tokens_per_s":
        return plan.scale * simulation.tokens_per_s
    if row["metric"] == "throughput/tokens_per_s_per_device":
        return plan.scale * simulation.tokens_per_s_per_device
    return plan.scale * simulation.mean(row["metric"])


def null(row: Row, plan: Plan, known: Sequence[tuple[Row, Plan]]) -> float:
    """What the null model says: work over devices, by the most like of the rows that a fit saw.

    Tokens a second are proportional to devices over active weights. NaN if no row is like it.
    """
    mine = plan.run.workload.sequences * plan.run.moments[0] * plan.run.counts.active_parameters
    for names in (("system", "block", "metric"), ("system", "metric"), ("metric",)):
        like = [(r, p) for r, p in known if all(r.get(n) == row.get(n) for n in names)]
        if like:
            other, base = like[0]
            theirs = base.run.workload.sequences * base.run.moments[0]
            theirs *= base.run.counts.active_parameters
            if row["metric"].startswith("time/"):
                work = mine / plan.run.num_devices / (theirs / base.run.num_devices)
            else:
                each = row["metric"].endswith("_per_device")
                ours, base_n = plan.run.num_devices, base.run.num_devices
                work = base.run.counts.active_parameters / plan.run.counts.active_parameters
                work *= 1.0 if each else ours / base_n
            return float(other["value"]) * work
    return math.nan


def fit(
    cells: Sequence[tuple[Row, Build]],
    start: Parameters,
    *,
    names: Sequence[str],
    rounds: int = 6,
    report: Callable[[str], None] = lambda line: None,
) -> Parameters:
    """Least squares of log errors over ``cells`` (Levenberg, 1944; Marquardt, 1963), in logarithms.

    ``names`` are the parameters that may move, within ``BOUNDS``.
    """
    low, high = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    fixed = {item.name: getattr(start, item.name) for item in fields(Parameters)}

    def errors(logs: np.ndarray) -> np.ndarray:
        moved = dict(zip(names, np.exp(logs).tolist(), strict=True))
        parameters = Parameters(**{**fixed, **moved})
        found = [math.log(predict(r, b, parameters) / float(r["value"])) for r, b in cells]
        return np.nan_to_num(np.array(found), nan=2.0)

    at = np.clip(np.log([fixed[name] for name in names]), low, high)
    error, damping, step = errors(at), 0.03, 0.04
    for _ in range(rounds):
        columns: list[np.ndarray] = []
        for i in range(len(names)):
            side = step if at[i] + step <= high[i] else -step
            moved = at.copy()
            moved[i] += side
            columns.append((errors(moved) - error) / side)
        slope = np.stack(columns, axis=1)
        for _ in range(4):
            square = slope.T @ slope + damping * np.eye(len(names))
            target = np.clip(at - np.linalg.solve(square, slope.T @ error), low, high)
            new = errors(target)
            if new @ new < error @ error:
                at, error, damping = target, new, damping / 3
                break
            damping *= 4
        else:
            break
        report(f"rms {math.sqrt(float(error @ error) / len(error)):.3f} {np.exp(at).round(5)}")
    return Parameters(**{**fixed, **dict(zip(names, np.exp(at).tolist(), strict=True))})


def summary(frame: Any) -> dict[str, float]:
    """Absolute errors of the column ``value`` against ``paper``: how large, how many.

    A run that the simulator finds out of memory counts as an infinite error.
    """
    ratio = frame["value"].to_numpy(float) / frame["paper"].to_numpy(float)
    error = np.nan_to_num(np.abs(ratio - 1.0), nan=np.inf)
    if not len(error):
        return {}
    return {
        "cells": float(len(error)),
        "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9, method="higher")),
        "max": float(error.max()),
        "within_10": float((error <= 0.10).mean()),
        "within_25": float((error <= 0.25).mean()),
        "within_50": float((error <= 0.50).mean()),
    }
