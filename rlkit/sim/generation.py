"""Simulated generation: engines on a virtual clock, which schedules see as they see real ones."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlkit.schedule.virtual import Future, Virtual
from rlkit.sim.engine import TINY, Engine
from rlkit.sim.groups import Group, Groups
from rlkit.sim.memory import Memory
from rlkit.sim.result import Recorder
from rlkit.sim.work import Run


class Generation:
    """Engines that generate groups: a ``rlkit.types.Feed``, and a ``rollout_step``.

    A group is finished when its last response has its reward. One that a filter takes out is
    generated again in its place, as under dynamic sampling.
    """

    def __init__(
        self, run: Run, memory: Memory, runs: Virtual, out: Recorder, *, seed: int, interrupts: bool
    ) -> None:
        base_s: list[float] = []
        self.engines = [Engine(run, memory.max_rows, base_s) for _ in range(run.num_engines)]
        self.interrupts = interrupts
        self.version = 0
        """Of the weights that engines have."""
        self.num_running = 0
        """Groups added and not taken yet."""
        self.busy_changed: Callable[[], None] = lambda: None
        """Called when an engine begins or ends to have rows."""
        self._run, self._runs, self._out = run, runs, out
        self._period_s = run.costs.slice_s + run.costs.turn_s
        self._turns = self._period_s / run.costs.slice_s if run.costs.slice_s else 1.0
        self._busy_since_s = 0.0  # when the first of the slices began that follow each other
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._groups: dict[int, Group] = {}  # being generated, by number
        self._finished: list[Group] = []
        self._batch: tuple[Groups, Future] | None = None

    # ---- what schedules call ----

    def rollout_step(self, asked: Groups) -> Future:
        """Generate these groups, all of them; ends with the last."""
        self._batch = asked, Future()
        self.add(asked)
        return self._batch[1]

    def add(self, prompts: Any) -> None:
        """Generate these groups beside those that run."""
        self.num_running += len(prompts)
        self._between_slices(self._begin, prompts.rows)

    def advance(self) -> Any:
        """Groups finished since; if none is, the caller sleeps until one may be."""
        if not self._finished:
            self._runs.sleep()
            return None
        found, self._finished = self._finished, []
        self.num_running -= len(found)
        return Groups(found)

    def mend(self, sync: Callable[[], object]) -> bool:
        """Simulated engines do not die."""
        return False

    def close(self) -> None:
        """Nothing is half written in a process that lives on."""

    # ---- what happens ----

    def slice_end_s(self) -> float:
        """When the slice ends that engines are in; now, if they are in none."""
        now_s = self._runs.now_s
        if not self._run.costs.slice_s or not any(engine.running for engine in self.engines):
            return now_s
        slices = math.ceil((now_s - self._busy_since_s) / self._period_s - TINY)
        return max(now_s, self._busy_since_s + slices * self._period_s)

    def load(self, load_s: float) -> None:
        """New weights to all engines, from now on; what is half written waits meanwhile."""
        self.version += 1
        now_s = self._runs.now_s
        for where, engine in enumerate(self.engines):
            rows = engine.running
            if rows:
                self._out.generated(where, engine, now_s, self.version - 1)
            begin_s = max(now_s, engine.clock_s)  # an engine that still loads does so first
            again_s = engine.interrupt(now_s, load_s)
            self._out.loaded(where, begin_s, load_s, again_s, self.version)
            engine.busy_since_s = engine.clock_s
            if rows:
                self._plan(where)

    def pace(self, slow: float) -> None:
        """Go on ``slow`` times slower than alone."""
        slow *= self._turns
        for where, engine in enumerate(self.engines):
            if engine.slow != slow:
                engine.advance(self._runs.now_s)
                engine.slow = slow
                self._plan(where)

    def _between_slices(self, call: Callable[..., None], *args: Any) -> None:
        end_s = self.slice_end_s()
        if end_s > self._runs.now_s:
            self._runs.at(end_s, call, *args)
        else:
            call(*args)

    def _begin(self, groups: Sequence[Group]) -> None:
        if not any(engine.running for engine in self.engines):
            self._busy_since_s = self._runs.now_s
        samples, touched = self._run.workload.samples, dict[int, None]()
        loads = [(engine.load, i) for i, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        drawn = self._run.workload.lengths.draw(self._rng, len(groups), samples).tolist()
        for group, lengths in zip(groups, drawn, strict=True):
            group.unfinished, group.first_version = samples, self.version
            self._groups[group.number] = group
            load, where = heapq.heappop(loads)  # all of a group on the engine with least to do
            heapq.heappush(loads, (load + samples, where))
            self.engines[where].add(self._runs.now_s, group.number, lengths)
            touched[where] = None
        for where in touched:
            self._plan(where)
        self.busy_changed()

    def _plan(self, where: int) -> None:
        engine = self.engines[where]
        end_s = engine.next_end_s()
        if end_s < math.inf:
            self._runs.at(end_s, self._end_rows, where, engine.stamp)

    def _end_rows(self, where: int, stamp: int) -> None:
        engine, prompt = self.engines[where], self._run.workload.prompt_tokens
        if stamp != engine.stamp:
            return
        now_s = self._runs.now_s
        for number, length in engine.finish(now_s):
            group, total = self._groups[number], length + prompt
            group.unfinished -= 1
            group.tokens += total
            group.squares += total * total
            if not group.unfinished:
                self._runs.at(now_s + self._run.costs.reward_s, self._finish, number)
        if not engine.running:
            self._out.generated(where, engine, now_s, self.version)
            self.busy_changed()
        self._plan(where)

    def _finish(self, number: int) -> None:
        group, share = self._groups.pop(number), self._run.trained_share
        if share < 1.0 and self._rng.random() >= share:
            self._out.dropped_tokens += group.tokens
            group.tokens = group.squares = 0.0
            self._begin([group])
            return
        group.last_version = self.version
        self._between_slices(self._give, group)

    def _give(self, group: Group) -> None:
        self._finished.append(group)
        if self._batch is None:
            self._runs.wake()
        elif len(self._finished) == self.num_running:
            (asked, future), self._batch = self._batch, None
            self._finished, self.num_running = [], 0
            self._runs.end(future, asked)
