"""Lane: one rollout group of a feed, its groups of responses and the slice that it generates."""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.futures import Future
from rlkit.cluster.group import WorkerGroup

logger = logging.getLogger("rlkit.cluster")

LOOK_S = 1.0
"""How long one wait for a slice lasts."""


class Lane:
    """One rollout group; the feed calls it under its lock."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self.rank_of = group, {}  # group id -> rank of the worker that has it
        self.slice: Future | None = None
        self._start_s = 0.0  # of the slice
        self.in_doubt = False  # a call failed: the workers may not have what rank_of says
        self.renew()

    def renew(self) -> None:
        """Its processes are new, and have nothing."""
        self.up, self.processes, self.slice = True, self.group.processes, None
        self.in_doubt = False

    def lose(self) -> list[int]:
        """Its processes are gone: the groups it had."""
        had = list(self.rank_of)
        self.up, self.slice = False, None
        self.rank_of.clear()
        return had

    def missing(self) -> list[int]:
        """Groups that its workers turn out not to have: it has them no more."""
        if self.up and self.group.processes != self.processes:  # somebody has started it again
            had = self.lose()
            self.renew()
            return had
        if not self.up or not self.in_doubt or self.slice is not None:
            return []
        held = self.group.begun()
        held = {group for ids in (held if len(self.group) > 1 else [held]) for group in ids}
        self.in_doubt, gone = False, [group for group in self.rank_of if group not in held]
        for group in gone:
            del self.rank_of[group]
        return gone

    def load(self) -> list[int]:
        """Groups on each rank."""
        counts = Counter(self.rank_of.values())
        return [counts[rank] for rank in range(len(self.group))]

    def begin(self, prompts: Batch, share: dict[int, int], how: dict[str, Any]) -> None:
        """Begin a group for each prompt, on the rank that ``share`` has for its id."""
        ranks = [share[group] for group in prompts.meta["group_ids"].tolist()]
        self.rank_of |= share
        try:
            self.group.begin(prompts, ranks=np.asarray(ranks), **how)
        except Exception:
            for group in share:
                del self.rank_of[group]
            raise

    def start(self, options: dict[str, Any]) -> None:
        """Generate for a slice, unless one is running."""
        if self.slice is None:
            self._start_s = time.monotonic()
            self.slice = self.group.submit.advance(**options)

    def take(self) -> Batch | None:
        """The groups that the slice has finished."""
        assert self.slice is not None, "nothing was started"
        try:  # after a KeyboardInterrupt it is asked again
            batch = self.slice.result()
        except Exception:
            self.slice = None
            raise
        self.slice = None
        for group in set() if batch is None else set(batch.meta["group_ids"].tolist()):
            self.rank_of.pop(group, None)
        return batch

    def check_time(self) -> None:
        """TimeoutError if the slice takes longer than the cluster lets a call take."""
        slice_: Any = self.slice
        call, limit_s = slice_._ticket, slice_._transport.pipeline.timeout_s
        if (waited_s := time.monotonic() - self._start_s) > limit_s:
            late = sorted(call.waiting.values())
            names = ", ".join(f"{self.group.name}/{rank}" for rank in late)
            ids = [group for group, rank in self.rank_of.items() if rank in late]
            raise TimeoutError(
                f"RolloutFeed: waited {waited_s:.0f} s for {names} to generate for a moment, with "
                f"{len(ids)} groups to finish (ids {ids[:5]}). Look what the process does; "
                "cluster.respawn(group) starts it again, and the feed gives it the groups anew."
            )

    def clear(self) -> None:
        """Forget the groups, and end what is half written of them."""
        if self.up and not self.group.lost and (self.rank_of or self.slice or self.in_doubt):
            try:
                self.group.abort()
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                logger.info("%s: what is half written was not ended: %s", self.group.name, error)
        self.slice, self.in_doubt = None, False
        self.rank_of.clear()


def ended(lanes: Iterable[Lane]) -> list[Lane]:
    """The lanes whose slice has ended; waits a moment for the first."""
    running = {lane: lane.slice for lane in lanes if lane.slice is not None}
    found = [lane for lane, slice_ in running.items() if slice_.done()]
    if found or not running:
        return found
    import ray

    refs = [ref for slice_ in running.values() for ref in slice_._ticket.waiting]
    with trace.wait("advance"):
        ray.wait(refs, num_returns=1, timeout=LOOK_S)
    found = [lane for lane, slice_ in running.items() if slice_.done()]
    for lane in running if not found else ():
        lane.check_time()
    return found
