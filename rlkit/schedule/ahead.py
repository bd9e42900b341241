"""Asynchronous: generation runs ahead of training as far as a bound on staleness allows."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

from rlkit.schedule.backlog import Backlog
from rlkit.schedule.called import Called
from rlkit.schedule.executors import Threads
from rlkit.schedule.parts import (
    Record,
    check_calls,
    check_executor,
    check_feed,
    check_rule,
    record,
)
from rlkit.schedule.stale import judged, oldest_version, staleness_metrics
from rlkit.schedule.staleness import StalenessRule
from rlkit.types import Executor, Feed, Handle

logger = logging.getLogger("rlkit.schedule")

WAIT_S = 600.0
"""How long nothing may happen before a schedule says what it waits for."""
MOST_DROPPED = 10
"""Train steps' worth of groups of the newest weights that a stale_policy may leave out in a row."""
STOP_S = 30.0
"""How long a schedule that is left waits for generation to come to a halt."""


def asynchronous(  # noqa: PLR0913  what all schedules have, and how far ahead it may be
    prompts: Iterable[Any] | Backlog,
    feed: Feed | Callable[[Any], Any],
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
    executor: Executor | None = None,
    *,
    max_staleness: float | None = None,
    rule: StalenessRule | None = None,
) -> Generator[Record, None, None]:
    """Generation never waits for training, training only for enough finished groups (AReaL,
    2505.24298).

    ``feed`` generates by itself (``rk.RolloutFeed(rollout, n=8)``), and its responses may change
    weights half written; a plain ``rollout_step`` in its place is called for one step's prompts
    after another, and weights come between two calls. Train steps take as many groups as the first
    batch of prompts has, and samples are at most about ``max_staleness`` of them old; a ``rule``
    says more: ``StalenessRule(groups_per_step=32, max_staleness=4, stale_policy=drop)``. A
    ``Backlog`` as ``prompts`` may go on with a run, so it needs one.

    ``prepare(chunk)`` scores groups as they finish; ``train_step(batch)`` gets the oldest of them
    that the rule's ``stale_policy`` leaves. ``sync()`` hands over weights and holds up generation
    for just that. Records end with the prompts; those that could fill no step are left.

    However it ends, nothing half written stays in the engines. With a ``Backlog`` as ``prompts``
    nothing of that is lost: another loop goes on with it. Engines that die are started again, get
    the weights by ``sync()``, and generate what they had.
    """
    check_calls(prepare=prepare, train_step=train_step, sync=sync)
    begun = isinstance(prompts, Backlog)
    backlog = prompts if begun else Backlog(prompts)
    rule = check_rule(rule, max_staleness, None if begun else backlog.first_size)
    if callable(feed):
        feed = Called(feed, size=rule.groups_per_step)
    check_feed(feed)
    with closing(check_executor(executor) or Threads()) as runs:
        line = _Line(backlog, feed, prepare, sync, runs, rule)
        try:
            while (batch := line.take()) is not None:
                step = line.rule.version
                ages = staleness_metrics(batch, version=step)
                ages["staleness/dropped_groups"] = float(line.rule.dropped)
                metrics = runs.run(train_step, batch)
                line.hand_over()
                yield record(step, batch, metrics, ages)
        finally:
            line.stop()


class _Line:
    """Groups from prompt to trainer. Turns run in the executor, one after another; the loop above
    takes what they have finished.
    """

    def __init__(
        self,
        backlog: Backlog,
        feed: Feed,
        prepare: Callable[[Any], None],
        sync: Callable[[], object],
        runs: Executor,
        rule: StalenessRule,
    ) -> None:
        self.rule = rule.rebase(version=rule.version, untrained=len(backlog.ready))
        self._first_version = rule.version
        self._backlog, self._changed = backlog, backlog.changed
        self._feed, self._prepare, self._sync, self._runs = feed, prepare, sync, runs
        self._chosen: list[Any] = []  # in the hands of the trainer
        self._left_out = 0  # groups of the newest weights, since one was chosen
        self._turn: Handle | None = None
        self._preparing: list[Handle] = []
        self._stopped = self._exhausted = self._holding = False
        if rule.version:  # the loop before this may have ended between a train step and its sync
            self._give_weights()
        with self._changed:  # else a turn that is quick puts the next one in its place before us
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
            with self._changed:
                prompt = self._backlog.begin()
                self._exhausted = prompt is None
                if prompt is not None:
                    self.rule = self.rule.submit()
                    prompts.append(prompt)
        if self._stopped:
            return
        if prompts:
            self._feed.add(prompts[0].concat(prompts))
        chunk = self._feed.advance() if self._feed.num_running else None
        with self._changed:
            if chunk is not None and not self._stopped:
                self._preparing.append(self._runs.submit(self._finish, chunk))
            self._go_on()

    def _finish(self, chunk: Any) -> None:
        """Prepare finished groups; they are ready then."""
        if not self._stopped:
            self._prepare(chunk)
        with self._changed:
            if not self._stopped:
                groups = list(chunk.groups())
                self.rule = self.rule.accept(len(groups))
                self._backlog.finish(groups)

    # ---- what the trainer does ----

    def take(self) -> Any:
        """The oldest groups of a step in one batch; None: there will be no more full ones."""
        start_s = time.monotonic()
        while True:
            with self._changed:
                start_s = time.monotonic() if self._backlog.ready else start_s
                self._choose()
                missing = self.rule.groups_per_step - len(self._chosen)
                if not missing:
                    return self._chosen[0].concat(self._chosen)
                if self._turn is None:
                    self._go_on()
                handles = [*self._preparing, *([self._turn] if self._turn else [])]
            if not handles:
                if self.rule.version == self._first_version:
                    logger.warning(
                        "asynchronous: the prompts ended before a train step, which takes %d "
                        "groups: %d are ready, %d were left out",
                        self.rule.groups_per_step, len(self._chosen), self.rule.dropped,
                    )  # fmt: skip
                return None
            what = f"{missing} more groups of {self._feed!r}"
            if self._preparing:
                what += f", {len(self._preparing)} batches of which are being prepared"
            left_s = WAIT_S - (time.monotonic() - start_s)
            for handle in wait_for(self._runs, handles, what, timeout_s=left_s):
                self._end(handle)

    def _choose(self) -> None:
        """Take ready groups, oldest first, until there are enough."""
        rule, ready = self.rule, self._backlog.ready
        ready.sort(key=oldest_version)
        while ready and len(self._chosen) < rule.groups_per_step:
            group = judged(ready[0], rule)  # an error leaves it ready
            version = oldest_version(ready.pop(0))
            if group is not None:
                self._chosen.append(group)
                self._left_out = 0
                continue
            self.rule = self.rule.drop_accepted()
            self._left_out += version == rule.version
            if self._left_out >= MOST_DROPPED * rule.groups_per_step:
                raise RuntimeError(
                    f"stale_policy: left out {self._left_out} groups in a row that the newest "
                    f"weights generated (version {version}), so no train step will come. Need a "
                    "policy that returns some groups: what does it ask of them?"
                )

    def hand_over(self) -> None:
        """What was taken is trained: new weights to the engines; the next version begins."""
        self._chosen = []
        if not self._feed.interrupts:
            self._drain()
        self._give_weights()
        with self._changed:
            self.rule, self._holding = self.rule.advance(), False
            if self._turn is None:
                self._go_on()

    def _give_weights(self) -> None:
        try:
            if not self._mended():
                self._sync()
        except Exception:
            if not self._mended():
                raise

    def _drain(self) -> None:
        """Begin nothing new until what runs is finished."""
        with self._changed:
            self._holding = True
        while (turn := self._turn) is not None:
            wait_for(self._runs, [turn], f"what {self._feed!r} still generates")
            self._end(turn)

    # ---- how calls and the loop end ----

    def _end(self, handle: Handle) -> None:
        """Raise the error of a call, if it has one that new engines do not mend."""
        try:
            handle.result()
        except Exception:
            if handle is not self._turn or not self._mended():
                raise
        with self._changed:
            self._preparing = [each for each in self._preparing if each is not handle]

    def _mended(self) -> bool:
        """Whether engines had died; then they are new and have the weights, and turns go on."""
        if not self._feed.mend(self._sync):
            return False
        with self._changed:
            if self._turn is not None and self._turn.done():  # it failed, else it had gone on
                self._go_on()
        return True

    def stop(self) -> None:
        """Start no more turns; what was not trained is the backlog's again."""
        with self._changed:
            self._stopped = True
        try:
            if self._turn is not None:
                self._runs.wait([self._turn], timeout_s=STOP_S)
            self._feed.close()
        finally:
            self._backlog.give_back(self._chosen)


def wait_for(
    runs: Executor, handles: list[Handle], what: str, *, timeout_s: float = WAIT_S
) -> list[Handle]:
    """Those of ``handles`` that are done, once one is; TimeoutError names ``what`` never came."""
    done = runs.wait(handles, timeout_s=timeout_s) if timeout_s > 0 else []
    if not done:
        raise TimeoutError(
            f"schedule: waited {WAIT_S:g} s for {what}, and nothing came. Look at the engines: "
            "are they paused, or a worker stuck? cluster.frame() lists them."
        )
    return done
