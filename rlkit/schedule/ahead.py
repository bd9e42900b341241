"""Schedules that generate ahead of training: one step, or as far as a bound on staleness allows."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from rlkit.schedule.executors import Threads
from rlkit.schedule.in_turn import Record
from rlkit.schedule.stale import staleness_metrics
from rlkit.schedule.staleness import StalenessRule
from rlkit.types import Executor, Feed, Handle

WAIT_S = 600.0
"""How long nothing may happen before a schedule says what it waits for."""


def one_step_off(
    prompts: Iterable[Any],
    rollout_step: Callable[[Any], Any],
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
    executor: Executor | None = None,
) -> Iterator[Record]:
    """Generate the next batch while this one is trained: every batch after the first is one step
    stale.

    Weights are handed over between two generations, when both have ended; the longest response
    holds up the next step. Arguments are those of ``synchronous``.
    """
    with closing(executor or Threads()) as runs:
        asked = iter(prompts)
        first = next(asked, None)
        coming = None if first is None else runs.submit(rollout_step, first)
        step = 0
        while coming is not None:
            batch = _ended(runs, coming, "generation")
            following = next(asked, None)
            coming = None if following is None else runs.submit(rollout_step, following)
            prepare(batch)
            metrics = runs.run(train_step, batch)
            if coming is not None:
                _wait(runs, [coming], "generation")
            sync()
            yield {"step": step, "batch": batch, **metrics}
            step += 1


def asynchronous(
    prompts: Iterable[Any],
    feed: Feed,
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
    executor: Executor | None = None,
    *,
    rule: StalenessRule,
) -> Iterator[Record]:
    """Generation never waits for training, training only for enough finished groups (AReaL,
    2505.24298).

    ``feed`` generates by itself (``rk.RolloutFeed(rollout, n=8)``); ``rule`` says how many groups
    may be under way: ``StalenessRule(groups_per_step=32, max_staleness=4)``. ``prepare(chunk)``
    scores groups as they finish; ``train_step(batch)`` gets the oldest ``groups_per_step`` of them
    that the rule's ``stale_policy`` leaves. ``sync()`` hands over weights while responses are half
    written, if the engine allows it, and holds up generation for just that. Records end with the
    prompts; those that could fill no step are left.
    """
    with closing(executor or Threads()) as runs:
        line = _Line(prompts, feed, prepare, runs, rule)
        try:
            while True:
                batch = line.take()
                if batch is None:
                    return
                step = line.rule.version
                ages = staleness_metrics(batch, version=step)
                metrics = runs.run(train_step, batch)
                line.hand_over(sync)
                yield {"step": step, "batch": batch, **ages, **metrics}
        finally:
            line.stop()


class _Line:
    """Groups from prompt to trainer. Turns run in the executor, one after another; the loop above
    takes what they have finished.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        feed: Feed,
        prepare: Callable[[Any], None],
        runs: Executor,
        rule: StalenessRule,
    ) -> None:
        self.rule, self._runs, self._feed, self._prepare = rule, runs, feed, prepare
        self._prompts = _one_by_one(prompts)
        self._ready: list[Any] = []
        self._changed = threading.Condition()
        self._turn: Handle | None = None
        self._preparing: list[Handle] = []
        self._stopped = self._exhausted = self._holding = False
        self._go_on()

    # ---- turns: submit, generate, prepare ----

    def _go_on(self) -> None:
        """Start the next turn, unless there is nothing to do in it."""
        if not self._stopped and (self._feed.num_running or self._may_submit()):
            self._turn = self._runs.submit(self._one_turn)
        else:
            self._turn = None

    def _may_submit(self) -> bool:
        return not (self._exhausted or self._holding) and self.rule.capacity >= 1

    def _one_turn(self) -> None:
        prompts = []
        while not self._stopped and self._may_submit():
            prompt = next(self._prompts, None)
            with self._changed:
                self._exhausted = prompt is None
                if prompt is not None:
                    self.rule = self.rule.submit()
                    prompts.append(prompt)
        if prompts:
            self._feed.add(prompts[0].concat(prompts))
        chunk = self._feed.advance() if self._feed.num_running else None
        with self._changed:
            if chunk is not None:
                self._preparing.append(self._runs.submit(self._finish, chunk))
            self._go_on()

    def _finish(self, chunk: Any) -> None:
        """Prepare finished groups; they are ready then."""
        self._prepare(chunk)
        groups = list(chunk.groups())
        with self._changed:
            self.rule = self.rule.accept(len(groups))
            self._ready += groups

    # ---- what the trainer does ----

    def take(self) -> Any:
        """The oldest groups of a step in one batch; None: there will be no more full ones."""
        chosen: list[Any] = []
        needed, start_s = self.rule.groups_per_step, time.monotonic()
        while True:
            with self._changed:
                start_s = time.monotonic() if self._ready else start_s
                self._choose(chosen)
                if len(chosen) == needed:
                    return chosen[0].concat(chosen)
                if self._turn is None:
                    self._go_on()
                handles = [*self._preparing, *([self._turn] if self._turn else [])]
            if not handles:
                return None
            left_s = WAIT_S - (time.monotonic() - start_s)
            more = f"{needed - len(chosen)} more groups of {self._feed!r}"
            for handle in _wait(self._runs, handles, more, timeout_s=left_s):
                handle.result()  # its error, if it has one
                with self._changed:
                    self._preparing = [each for each in self._preparing if each is not handle]

    def _choose(self, chosen: list[Any]) -> None:
        """Move ready groups to ``chosen``, oldest first, until there are enough."""
        rule = self.rule
        self._ready.sort(key=lambda group: int(group.meta["policy_version"].min()))
        while self._ready and len(chosen) < rule.groups_per_step:
            group = rule.stale_policy(
                self._ready.pop(0), version=rule.version, max_staleness=rule.max_staleness
            )
            if group is None:
                self.rule = self.rule.drop_accepted()
            else:
                chosen.append(group)

    def hand_over(self, sync: Callable[[], object]) -> None:
        """New weights to the engines; the next version begins."""
        if not self._feed.interrupts:
            self._drain()
        sync()
        with self._changed:
            self.rule, self._holding = self.rule.advance(), False
            if self._turn is None:
                self._go_on()

    def _drain(self) -> None:
        """Begin nothing new until what runs is finished."""
        with self._changed:
            self._holding = True
        while (turn := self._turn) is not None:
            _wait(self._runs, [turn], f"what {self._feed!r} still generates")
            if turn is self._turn and turn.done():
                turn.result()
                return

    def stop(self) -> None:
        """Start no more turns; what runs ends by itself."""
        with self._changed:
            self._stopped = True


def _one_by_one(prompts: Iterable[Any]) -> Iterator[Any]:
    """Prompts of batches of any size, one at a time."""
    for batch in prompts:
        for i in range(len(batch)):
            yield batch.select([i])


def _wait(
    runs: Executor, handles: list[Handle], what: str, *, timeout_s: float = WAIT_S
) -> list[Handle]:
    done = runs.wait(handles, timeout_s=timeout_s) if timeout_s > 0 else []
    if not done:
        raise TimeoutError(
            f"schedule: waited {WAIT_S:.0f} s for {what}, and nothing came. Look at the engines: "
            "are they paused, or a worker stuck? cluster.frame() lists them."
        )
    return done


def _ended(runs: Executor, handle: Handle, what: str) -> Any:
    _wait(runs, [handle], what)
    return handle.result()
