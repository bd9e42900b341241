"""RolloutFeed: generation that goes on by itself, on the driver's side of rollout groups."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlkit.batch import Batch
from rlkit.checks import finite, whole
from rlkit.cluster.calls import Interrupted
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.lane import Lane, ended
from rlkit.config import SamplingParams

logger = logging.getLogger("rlkit.cluster")

MOST_DEATHS = 3
"""Deaths without a finished group between them, after which no engine is started again."""
CLOSE_S = 30.0
"""How long ``close`` waits for a slice that runs."""

_FEEDS: weakref.WeakValueDictionary[WorkerGroup, "RolloutFeed"] = weakref.WeakValueDictionary()
"""Who generates with a rollout group."""


class RolloutFeed:
    """Groups go in with ``add`` and come out whole with ``advance``, as they end.

    The engines generate in slices of ``seconds``. While one result is looked at, the next slice is
    queued already, so engines on a cluster do not wait for the driver; new prompts and new weights
    get in between two slices. Each prompt goes to the engine with the fewest groups.

    Of several rollout groups each goes on by itself: while one gets weights, or is started again
    because a worker of it died, the others generate, and take its groups. A context manager:
    leaving it, or ``close``, ends what is half written.
    """

    def __init__(
        self,
        rollout: WorkerGroup | Sequence[WorkerGroup],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        seconds: float = 0.1,
        interrupts: bool = True,
        max_age: int | None = None,
    ) -> None:
        """``interrupts``: weights change while responses are half written; without, those that run
        are finished under the old weights first, and nothing new begins meanwhile. ``max_age``: a
        half-written response that many versions older than the weights, at most, goes on; an older
        one begins again.
        """
        if not finite("seconds", seconds):
            raise ValueError(f"seconds: got {seconds}, need more than 0: how long a slice takes.")
        SamplingParams(
            temperature=temperature, max_new_tokens=1 if max_new_tokens is None else max_new_tokens
        )
        self.lanes = [Lane(group) for group in _groups_of(rollout)]
        self.seconds, self.interrupts = seconds, interrupts
        self._how = {"n": whole("n", n, what="response a prompt"), "temperature": temperature}
        self._how["max_new_tokens"] = max_new_tokens
        self._slice: dict[str, Any] = {"seconds": seconds}
        if max_age is not None:
            self._slice["max_age"] = whole("max_age", max_age, least=0, what="version")
        self._prompts: dict[int, Batch] = {}  # group id -> its prompt, from add until it is taken
        self._waiting: list[int] = []  # group ids that no engine has
        self._found: list[Batch] = []  # finished, to be given by advance
        self._deaths = 0
        self._lock = threading.RLock()

    @property
    def num_running(self) -> int:
        """Groups added and not taken yet."""
        return len(self._prompts)

    def add(self, prompts: Batch) -> None:
        """Generate a group for each prompt, beside those that run: ``advance`` begins them."""
        if not isinstance(prompts, Batch):
            raise TypeError(
                f"add: got {type(prompts).__name__}, need a batch of prompts, as a task makes them."
            )
        with self._lock:
            self._claim()
            ids = prompts.meta["group_ids"].tolist()
            twice = [group for group in ids if group in self._prompts]
            if twice:
                raise ValueError(
                    f"add: got group {twice[0]}, which is being generated; need other prompts."
                )
            self._prompts |= {group: prompts.select([i]) for i, group in enumerate(ids)}
            self._waiting += ids

    def advance(self) -> Batch | None:
        """Let generation go on for a slice: groups finished since, whole; None: none.

        TimeoutError if engines do not answer for longer than the cluster lets a call take.
        """
        with self._lock:
            for lane in self.lanes:
                self._waiting += self._attempt(lane, lane.missing) or []
            self._begin()
            for lane in self.lanes:
                self._start(lane)
            for lane in ended(self.lanes):
                batch = self._attempt(lane, lane.take)
                self._found += [] if batch is None else [batch]
                if not lane.group.in_process:
                    self._start(lane)  # it goes on while the caller looks at the batch
            return self._taken()

    def mend(self, sync: Callable[[], object]) -> bool:
        """Start rollout groups again of which a worker died, and give them weights by ``sync()``.

        Whether there were any. Their unfinished groups are generated again, under the same prompts.
        """
        with self._lock:
            dead = [lane for lane in self.lanes if lane.group.lost or not lane.up]
            for lane in dead:
                self._waiting += lane.lose()
        self._deaths += len(dead)
        if not dead or self._deaths > MOST_DEATHS:
            return False
        for lane in dead:
            if lane.group.lost:
                logger.warning("%s is started again: %s", lane.group.name, lane.group.lost)
                lane.group._transport.respawn()
        sync()
        with self._lock:
            for lane in dead:
                lane.renew()
        return True

    def close(self) -> None:
        """Forget all groups, and end what is half written in the engines; it may be used again."""
        if not self._lock.acquire(timeout=CLOSE_S):
            logger.warning("%r: a slice does not end, so its responses were not ended", self)
            return
        try:
            for held in (self._prompts, self._waiting, self._found):
                held.clear()
            self._deaths = 0
            for lane in self.lanes:
                lane.clear()
        finally:
            self._lock.release()

    # ---- inside ----

    def _claim(self) -> None:
        """RuntimeError if another feed generates with one of the groups: it would get our rows."""
        for lane in self.lanes:
            other = _FEEDS.get(lane.group)
            if other is not None and other is not self and other.num_running:
                raise RuntimeError(
                    f"RolloutFeed: {lane.group.name} generates for another one, {other!r}; need "
                    "one feed a rollout group at a time. End the loop that uses that one, or spawn "
                    "another group."
                )
            _FEEDS[lane.group] = self

    def _begin(self) -> None:
        """Hand waiting groups to ranks, each to the one with the fewest."""
        while self._waiting:
            up = [lane for lane in self.lanes if lane.up]
            if not up:
                raise RuntimeError(
                    f"{self!r}: a worker of each rollout group died. feed.mend(resharder.reshard) "
                    f"starts them again, as a schedule does up to {MOST_DEATHS} times in a row."
                )
            load = {(i, rank): n for i, lane in enumerate(up) for rank, n in enumerate(lane.load())}
            shares: list[dict[int, int]] = [{} for _ in up]
            for group in self._waiting:
                i, rank = min(load, key=lambda place: (load[place], place))
                load[i, rank] += 1
                shares[i][group] = rank
            for lane, share in zip(up, shares, strict=True):
                if share:
                    prompts = Batch.concat([self._prompts[group] for group in share])
                    self._attempt(lane, partial(lane.begin, prompts, share, self._how))
                self._waiting = [group for group in self._waiting if group not in lane.rank_of]

    def _start(self, lane: Lane) -> None:
        if lane.up and lane.rank_of:
            self._attempt(lane, partial(lane.start, self._slice))

    def _attempt(self, lane: Lane, call: Callable[[], Any]) -> Any:
        """A call to a lane, or None if it fails of a death or of another call's failure."""
        try:
            return call()
        except Interrupted:  # not run, or stopped: it is called again
            lane.in_doubt = True
        except BaseException as error:
            lane.in_doubt = True
            if not (isinstance(error, Exception) and lane.group.lost):
                raise
            self._waiting += lane.lose()
            if not any(each.up for each in self.lanes):
                raise
            logger.warning("%s: the other rollout groups take its groups", lane.group.lost)
        return None

    def _taken(self) -> Batch | None:
        if not self._found:
            return None
        batch, self._found, self._deaths = Batch.concat(self._found), [], 0
        for group in set(batch.meta["group_ids"].tolist()):
            self._prompts.pop(group, None)
        return batch

    def __enter__(self) -> "RolloutFeed":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        parts = [
            f"{num} on {lane.group.name}/{rank}"
            for lane in self.lanes
            for rank, num in enumerate(lane.load())
            if num
        ]
        parts += [f"{len(self._waiting)} waiting"] if self._waiting else []
        return f"RolloutFeed(groups running: {', '.join(parts) or 'none'})"


def _groups_of(rollout: Any) -> list[WorkerGroup]:
    """One rollout group or several, each once."""
    groups = list(rollout) if isinstance(rollout, list | tuple) else [rollout]
    wrong = [g for g in groups if not (isinstance(g, WorkerGroup) and "advance" in g.methods)]
    if wrong or not groups or len(set(groups)) < len(groups):
        raise TypeError(
            f"RolloutFeed: got {rollout!r}, need a rollout group or a list of several, each once: "
            "cluster.spawn(rk.RolloutWorker, model)."
        )
    return groups
