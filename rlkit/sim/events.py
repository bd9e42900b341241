"""Discrete events on a virtual clock: engines finish rows, groups get rewards, the trainer trains.

The order of things is a ``Schedule``; who may start is decided by ``rlkit.schedule.StalenessRule``,
the object that real asynchronous runs use.
"""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from rlkit.checks import whole
from rlkit.schedule import StalenessRule
from rlkit.sim.clock import Clock, Job
from rlkit.sim.cost import logprobs, update
from rlkit.sim.engine import Engine
from rlkit.sim.memory import Memory
from rlkit.sim.result import Recorder
from rlkit.sim.work import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """When groups start and when engines take new weights."""

    max_staleness: float
    """Of the staleness rule."""
    interrupt: bool
    """Engines stop in the middle of responses for new weights; else they finish them first."""
    batches: bool
    """A whole step's groups start together, when none runs; else a group as soon as it may."""
    max_running: int | None = None
    """Groups that may run at once."""

    def __post_init__(self) -> None:
        if math.isinf(self.max_staleness) and self.max_running is None:
            raise ValueError(
                "max_staleness: got inf without max_running, need a finite one, or a number of "
                "groups that may run at once."
            )


def synchronous() -> Schedule:
    """Generate a batch, train on it, move the weights, and so on."""
    return Schedule(max_staleness=0, interrupt=False, batches=True)


def one_step_off() -> Schedule:
    """Generate a batch while the one before it is trained."""
    return Schedule(max_staleness=1, interrupt=False, batches=True)


def asynchronous(
    *, max_staleness: float, interrupt: bool = True, max_running: int | None = None
) -> Schedule:
    """Generate all the time, at most ``max_staleness`` train steps ahead (AReaL)."""
    return Schedule(
        max_staleness=max_staleness, interrupt=interrupt, batches=False, max_running=max_running
    )


@dataclass(slots=True)
class Group:
    """A prompt's responses on their way."""

    number: int
    unfinished: int
    version: int
    tokens: float = 0.0
    squares: float = 0.0


class Loop:
    """One run of a schedule: what is generated, what is trained, and the rule between them."""

    def __init__(self, run: Run, schedule: Schedule, memory: Memory, *, seed: int) -> None:
        if run.shared and (schedule.max_staleness or not schedule.batches):
            raise ValueError(
                f"rollout_devices: got 0 with {schedule}, need some: devices that take turns "
                "cannot generate and train at once. Use synchronous(), or set rollout_devices."
            )
        self.run, self.schedule, self.clock = run, schedule, Clock()
        self.rule = StalenessRule(
            groups_per_step=run.workload.prompts,
            max_staleness=schedule.max_staleness,
            max_running=schedule.max_running,
        )
        base_s: list[float] = []
        self.engines = [Engine(run, memory.max_rows, base_s) for _ in range(run.num_engines)]
        self.out = Recorder(run, memory)
        self.submitted = 0
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._groups: dict[int, Group] = {}
        self._ready: list[int] = []  # heap: the oldest group is trained first
        self._draining = self._training = False
        self._job: Job | None = None
        self._quota = self._chunk = 0
        chunk_costs = replace(run.costs, trainer_s=run.costs.trainer_s / run.chunks)
        self._piece = replace(
            run, minibatches=max(1, run.minibatches // run.chunks), costs=chunk_costs
        )
        self._reshard_s = run.reshard(run).cost.seconds if run.reshard else 0.0
        self._dock_s = run.dock(run).cost.seconds / run.chunks if run.dock else 0.0

    def play(self, steps: int) -> Recorder:
        """Run until that many train steps are done."""
        whole("steps", steps)
        self._submit()
        while self.rule.version < steps and self.clock.step():
            pass
        return self.out

    def _submit(self) -> None:
        if self._draining or (self.run.shared and self._training):
            return
        room = self.rule.capacity
        if self.schedule.batches:
            if not self._quota and not self.rule.running and room >= self.run.workload.prompts:
                self._quota = self.run.workload.prompts
            room = min(room, self._quota)
        num = int(room)
        if not num:
            return
        self.rule = self.rule.submit(num)
        self._quota -= num if self.schedule.batches else 0
        samples = self.run.workload.samples
        touched: dict[int, None] = {}
        loads = [(engine.load, i) for i, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        for lengths in self.run.workload.lengths.draw(self._rng, num, samples).tolist():
            group = Group(self.submitted, samples, self.rule.version)
            self._groups[group.number] = group
            load, where = heapq.heappop(loads)  # all of a group on the engine with least to do
            heapq.heappush(loads, (load + samples, where))
            self.engines[where].add(self.clock.now_s, group.number, lengths)
            touched[where] = None
            self.submitted += 1
        for where in touched:
            self._plan(where)
        self._pace()

    def _plan(self, where: int) -> None:
        engine = self.engines[where]
        end_s = engine.next_end_s()
        if end_s < math.inf:
            self.clock.at(end_s, self._finish, where, engine.stamp)

    def _finish(self, where: int, stamp: int) -> None:
        engine, prompt = self.engines[where], self.run.workload.prompt_tokens
        if stamp != engine.stamp:
            return
        now_s = self.clock.now_s
        for number, length in engine.finish(now_s):
            group, total = self._groups[number], length + prompt
            group.unfinished -= 1
            group.tokens += total
            group.squares += total * total
            if not group.unfinished:
                self.clock.at(now_s + self.run.costs.reward_s, self._reward, number)
        if not engine.running:
            self.out.generated(where, engine, now_s, self.rule.version)
            self._pace()
        self._plan(where)

    def _reward(self, number: int) -> None:
        if self.run.trained_share < 1.0 and self._rng.random() >= self.run.trained_share:
            self.rule = self.rule.drop()
            self.out.dropped_tokens += self._groups.pop(number).tokens
            self._quota += self.schedule.batches
        else:
            self.rule = self.rule.accept()
            heapq.heappush(self._ready, number)
        self._train()
        self._drained()
        self._submit()

    def _train(self) -> None:
        need = self.run.workload.prompts // self.run.chunks
        if self._training or len(self._ready) < need:
            return
        self._training = True
        groups = [self._groups.pop(heapq.heappop(self._ready)) for _ in range(need)]
        tokens, squares = sum(g.tokens for g in groups), sum(g.squares for g in groups)
        rows = need * self.run.workload.samples
        stages = {
            "dock": self._dock_s,
            "logprobs": logprobs(self._piece, tokens, squares, rows).seconds,
            "update": update(self._piece, tokens, squares, rows).seconds,
        }
        late = [self.rule.version - group.version for group in groups]
        facts = {"tokens": tokens, "rows": rows, "late": late}
        self._job = job = Job(self.clock.now_s, stages, facts)
        self.clock.at(job.pace(self.clock.now_s, 1.0), self._trained, job, job.stamp)
        self._pace()

    def _pace(self) -> None:
        """Workers that share cores slow each other down while they are busy."""
        share, now_s, job = self.run.costs.contention, self.clock.now_s, self._job
        if not share:
            return
        busy = (job is not None) + sum(engine.running > 0 for engine in self.engines)
        slow = 1.0 + share * max(0, busy - 1)
        for where, engine in enumerate(self.engines):
            if engine.slow != slow:
                engine.advance(now_s)
                engine.slow = slow
                self._plan(where)
        if job and job.slow != slow:
            self.clock.at(job.pace(now_s, slow), self._trained, job, job.stamp)

    def _trained(self, job: Job, stamp: int) -> None:
        now_s = self.clock.now_s
        if stamp != job.stamp:  # its pace has changed since
            return
        self._job = None
        self.out.trained(job.start_s, job.stages(now_s), **job.facts)
        self._pace()
        self._chunk = (self._chunk + 1) % self.run.chunks
        if self._chunk:
            self._training = False
            self._train()
            return
        self.rule = self.rule.advance()
        moved_s = self._reshard_s
        if self.run.shared or self.schedule.interrupt:
            for where, engine in enumerate(self.engines):
                self._load(where, engine, now_s)
        else:
            self._draining = True
        self.out.stepped(now_s, moved_s, self.rule.version)
        self.clock.at(now_s + moved_s, self._go_on)

    def _go_on(self) -> None:
        self._training = False
        self._train()
        self._drained()
        self._submit()

    def _drained(self) -> None:
        """Engines that finish before they load do so when the last row is done."""
        if not self._draining or self.rule.running:
            return
        self._draining = False
        for where, engine in enumerate(self.engines):
            self._load(where, engine, self.clock.now_s)

    def _load(self, where: int, engine: Engine, now_s: float) -> None:
        rows = engine.running
        if rows:
            self.out.generated(where, engine, now_s, self.rule.version - 1)
        begin_s = max(now_s, engine.clock_s)  # an engine that still loads does so first
        again_s = engine.interrupt(now_s, self._reshard_s)
        self.out.loaded(where, begin_s, self._reshard_s, again_s, self.rule.version)
        engine.busy_since_s = engine.clock_s
        if rows:
            self._plan(where)
