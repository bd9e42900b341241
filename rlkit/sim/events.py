"""Discrete events: the schedules of real runs, driven on a virtual clock by what stages would take.

``rlkit.schedule`` has the loops, and the rule of who may start; here are the stages they call.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from numbers import Real
from typing import Any

from rlkit.checks import fits, instance, whole
from rlkit.schedule import StalenessRule, ahead, in_turn, one_step
from rlkit.schedule.virtual import Future, Virtual
from rlkit.sim.cost import logprobs, update
from rlkit.sim.generation import Generation
from rlkit.sim.groups import Group, Groups
from rlkit.sim.job import Job
from rlkit.sim.memory import Memory
from rlkit.sim.moves import moved
from rlkit.sim.result import Recorder
from rlkit.sim.work import Run

Record = dict[str, Any]
RECORDS = "a function of (loop) that returns an iterator of records. Yield one a train step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One of ``rlkit.schedule``, and what it is told."""

    start: Callable[["Loop"], Iterator[Record]]
    """Calls it with the loop's stages."""
    bounded: bool = False
    """Whether it has a staleness rule, to which the rest belongs."""
    max_staleness: float = 0.0
    """Of the rule."""
    interrupt: bool = False
    """Engines stop in the middle of responses for new weights; else they finish them first."""
    max_running: int | None = None
    """Of the rule: groups that may run at once."""

    def __post_init__(self) -> None:
        fits("start", self.start, "loop")
        if not isinstance(self.max_staleness, Real) or not self.max_staleness >= 0:
            raise ValueError(
                f"max_staleness: got {self.max_staleness!r}, need 0 or more train steps."
            )
        if self.max_running is not None:
            whole("max_running", self.max_running, what="groups")
        if self.max_staleness and not self.bounded:
            raise ValueError(
                f"max_staleness: got {self.max_staleness}, need asynchronous(max_staleness=...): "
                "the other schedules have a staleness of their own."
            )
        if math.isinf(self.max_staleness) and self.max_running is None:
            raise ValueError(
                "max_staleness: got inf without max_running, need a finite one, or a number of "
                "groups that may run at once."
            )

    @property
    def warm_up(self) -> float:
        """Steps until generation is as far ahead as it may be."""
        return self.max_staleness + 1 if self.bounded else float(self.start is _one_step_off)

    @property
    def steady_steps(self) -> int:
        """Steps of a run whose means are those of a long one: the warm-up and eight more."""
        return int(min(self.warm_up, 32)) + 8


def synchronous() -> Schedule:
    """``rk.schedule.synchronous``: generate a batch, train on it, move the weights, and so on."""
    return Schedule(start=_synchronous)


def one_step_off() -> Schedule:
    """``rk.schedule.one_step_off``: generate a batch while the one before it is trained."""
    return Schedule(start=_one_step_off)


def asynchronous(
    *, max_staleness: float, interrupt: bool = True, max_running: int | None = None
) -> Schedule:
    """``rk.schedule.asynchronous``: generate all the time, up to ``max_staleness`` ahead."""
    return Schedule(
        start=_asynchronous, bounded=True, max_staleness=max_staleness, interrupt=interrupt,
        max_running=max_running,
    )  # fmt: skip


def _synchronous(loop: "Loop") -> Iterator[Record]:
    parts = (loop.generation.rollout_step, loop.prepare, loop.train_step, loop.sync)
    return in_turn.synchronous(loop.prompts(), *(partial(loop.runs.run, part) for part in parts))


def _one_step_off(loop: "Loop") -> Iterator[Record]:
    sync = partial(loop.runs.run, loop.sync)
    parts = (loop.generation.rollout_step, loop.prepare, loop.train_step, sync)
    return one_step.one_step_off(loop.prompts(), *parts, loop.runs)


def _asynchronous(loop: "Loop") -> Iterator[Record]:
    how, sync = loop.schedule, partial(loop.runs.run, loop.sync)
    rule = StalenessRule(
        groups_per_step=loop.run.workload.prompts,
        max_staleness=how.max_staleness,
        max_running=how.max_running,
    )
    parts = (loop.generation, loop.prepare, loop.train_step, sync)
    return ahead.asynchronous(loop.prompts(), *parts, loop.runs, rule=rule)


class Loop:
    """One run of a schedule: its stages, and the seconds that each takes."""

    def __init__(self, run: Run, schedule: Schedule, memory: Memory, *, seed: int) -> None:
        if run.shared and schedule.start is not _synchronous:
            raise ValueError(
                f"rollout_devices: got 0 with {schedule.start.__name__[1:]}, need some: devices "
                "that take turns cannot generate and train at once. Use synchronous(), or set "
                "rollout_devices."
            )
        self.run, self.schedule, self.runs = run, schedule, Virtual()
        self.out = Recorder(run, memory)
        sliced = run.costs.slice_s if schedule.bounded else 0.0  # only a feed goes by slices
        self.generation = Generation(
            replace(run, costs=replace(run.costs, slice_s=sliced)),
            memory, self.runs, self.out, seed=seed, interrupts=schedule.interrupt,
        )  # fmt: skip
        self.generation.pace(1.0)
        self.generation.busy_changed = self._pace
        self._free_s = 0.0  # when the trainer has done all it was given
        self._job: Job | None = None
        self._update = Future()
        chunk_costs = replace(run.costs, trainer_s=run.costs.trainer_s / run.chunks)
        self._piece = replace(
            run, minibatches=max(1, run.minibatches // run.chunks), costs=chunk_costs
        )
        self._reshard_s = moved(run, "reshard").cost.seconds
        self._dock_s = moved(run, "dock").cost.seconds / run.chunks

    def play(self, steps: int) -> Recorder:
        """Run that many train steps."""
        records: Iterator[Record] = self.schedule.start(self)
        instance("Schedule.start", records, Iterator, such_as=RECORDS)
        for record in islice(records, steps):
            self.out.records[-1] |= {n: value for n, value in record.items() if n != "batch"}
        return self.out

    # ---- the stages ----

    def prompts(self) -> Iterator[Groups]:
        """A step's prompts, without end."""
        size = self.run.workload.prompts
        for first in count(0, size):
            yield Groups([Group(number) for number in range(first, first + size)])

    def prepare(self, batch: Groups) -> None:
        """The trainer may have them; rewards came with them, logprobs are the trainer's work."""
        for group in batch.rows:
            group.ready_s = self.runs.now_s

    def train_step(self, batch: Groups) -> Any:
        """A future: train on them in ``run.chunks`` pieces, each as soon as it is there.

        The trainer has worked on all pieces but the last before the last group came.
        """
        size = len(batch) // self.run.chunks
        pieces = [batch.rows[i : i + size] for i in range(0, len(batch), size)]
        for piece in pieces[:-1]:
            start_s = max(self._free_s, *(group.ready_s for group in piece))
            stages, facts = self._work(piece)
            self.out.trained(start_s, stages, **facts)
            self._free_s = start_s + sum(stages.values())
        self._job = job = Job(max(self._free_s, self.runs.now_s), *self._work(pieces[-1]))
        self._update = Future()
        self.runs.at(job.pace(job.start_s, 1.0), self._trained, job, job.stamp)
        self._pace()
        return self._update

    def sync(self) -> Future:
        """Move the weights: engines load them meanwhile, from the end of their slice on."""
        now_s, begin_s = self.runs.now_s, self.generation.slice_end_s()
        moved_s = begin_s - now_s + self._reshard_s
        self.out.stepped(now_s, moved_s, self.generation.version + 1)
        self.runs.at(begin_s, self.generation.load, self._reshard_s)
        self._free_s = now_s + moved_s
        return self.runs.after(moved_s)

    # ---- the trainer ----

    def _work(self, groups: Sequence[Group]) -> tuple[dict[str, float], dict[str, Any]]:
        """Seconds by stage, and what a record says of them."""
        tokens, squares = sum(g.tokens for g in groups), sum(g.squares for g in groups)
        rows = len(groups) * self.run.workload.samples
        stages = {
            "dock": self._dock_s,
            "logprobs": logprobs(self._piece, tokens, squares, rows).seconds,
            "update": update(self._piece, tokens, squares, rows).seconds,
        }
        late = [self.generation.version - group.first_version for group in groups]
        return stages, {"tokens": tokens, "rows": rows, "late": late}

    def _trained(self, job: Job, stamp: int) -> None:
        if stamp != job.stamp:  # its pace has changed since
            return
        self._free_s, self._job = self.runs.now_s, None
        self.out.trained(job.start_s, job.stages(self._free_s), **job.facts)
        self._pace()
        self.runs.end(self._update, {})

    def _pace(self) -> None:
        """Workers that share cores slow each other down while they are busy."""
        share, now_s, job = self.run.costs.contention, self.runs.now_s, self._job
        if not share:
            return
        engines = self.generation.engines
        busy = (job is not None) + sum(engine.running > 0 for engine in engines)
        slow = 1.0 + share * max(0, busy - 1)
        self.generation.pace(slow)
        if job and job.slow != slow:
            self.runs.at(job.pace(now_s, slow), self._trained, job, job.stamp)
