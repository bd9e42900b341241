"""Controller: which rows one stage may have, which it has, which it is done with. Metadata only.

A row is offered, leased to a holder, and consumed when the holder acknowledges it; a lease that
nobody keeps alive or that is given back is offered again. Every lease has a token, higher than all
before it, and an answer with the token of a lease that ended is refused.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit.dock.arrivals import Arrivals
from rlkit.dock.leases import Leases
from rlkit.dock.messages import Grant, Held, Notice, Places, Request, Shortage
from rlkit.dock.room import Room
from rlkit.dock.rowtable import RowTable
from rlkit.dock.samplers import checked
from rlkit.dock.view import View

logger = logging.getLogger("rlkit.dock")

MAX_WITHDRAWN = 100  # requests whose interrupted call may still be on its way here


class Controller:
    """One stage's view of the rows; every method may be called from any thread."""

    def __init__(
        self,
        stage: str,
        *,
        lease_s: float = 60.0,
        capacity: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        commit: Callable[[int, Held | None], Any] = lambda token, held: None,
    ) -> None:
        """``capacity``: rows that may wait for this stage; ``commit(token, lease)`` keeps what must
        outlive this process before anybody is told of it.
        """
        self.stage = stage
        self._arrivals, self._room = Arrivals(), Room(capacity)
        self._leases = Leases(stage, lease_s=lease_s, commit=commit)
        self._lease_s, self._clock = lease_s, clock
        self._changed, self._frozen_until = threading.Condition(), -np.inf
        self._withdrawn: list[str] = []

    # ---- rows ----

    def notice(self, notice: Notice) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
        """Enter a write.

        Returns the uids that came too late, and node -> column -> uids whose values there are out
        of date now: the writer frees both.
        """
        with self._changed:
            found = self._arrivals.enter(notice)
            self._room.arrived(notice.uids)
            self._changed.notify_all()
            return found

    @property
    def _table(self) -> RowTable:
        return self._arrivals.table

    def admit(
        self, uids: np.ndarray, group_ids: np.ndarray, request_id: str, *, timeout_s: float
    ) -> Shortage | None:
        """Wait until there is room for those rows that are new; the Shortage if there is none."""
        start = self._clock()
        with self._changed:
            while True:
                now = self._clock()
                self._expire(now)
                if request_id in self._withdrawn:
                    return None
                if self._room.promise(self._table, uids, group_ids, until=now + self._lease_s):
                    return None
                if now - start >= timeout_s:
                    short = self._shortage((), len(uids), now - start, {})
                    return replace(short, rows=self._room.used(self._table))
                self._sleep(start + timeout_s - now, now)

    def forget(self, uids: np.ndarray, *, retired: bool = True) -> None:
        """Drop rows; writes of ``retired`` ones that come later are refused.

        Others may come back as new rows, so leases that have some of them end.
        """
        with self._changed:
            if not retired:
                hit = [h for h in self._leases.open_ones() if np.isin(h.uids, uids).any()]
                self._release(hit, "lost rows with the node that had them")
            self._table.drop(uids)
            self._leases.forget(uids)
            if retired:
                self._arrivals.retired.add(uids)
            self._changed.notify_all()

    def lost(self, node: str) -> np.ndarray:
        """Uids of rows not consumed here that have a column on ``node``."""
        with self._changed:
            hit = self._table.on_node(node) & (self._table["consumed"] == 0)
            return self._table["uid"][hit]

    def where(
        self, uids: np.ndarray, columns: Sequence[str], *, timeout_s: float
    ) -> Places | Shortage:
        """Where ``columns`` of ``uids`` lie, once all of them are written; takes no lease."""
        start = self._clock()
        with self._changed:
            while True:
                missing = self._table.missing(uids, columns)
                if not missing:
                    return self._table.places(uids, columns)
                waited_s = self._clock() - start
                gone = tuple(sorted(uids[self._arrivals.retired.among(uids)].tolist()))
                if waited_s >= timeout_s or gone:
                    there = self._table.find(uids)[1]
                    missing = self._table.missing(uids[there], columns)
                    short = self._shortage(tuple(columns), len(uids), waited_s, missing)
                    unknown = tuple(np.setdiff1d(uids[~there], gone).tolist())
                    return replace(short, gone=gone, unknown=unknown)
                self._changed.wait(timeout_s - waited_s)

    # ---- leases ----

    def get(self, request: Request, *, timeout_s: float) -> Grant | Shortage:
        """Lease rows that have all columns asked for, or say what is short when time is up."""
        start = self._clock()
        with self._changed:
            while True:
                now = self._clock()
                self._expire(now)
                if request.id in self._withdrawn:  # nobody waits for it any more
                    return self._short_of(request, now - start)
                held = self._leases.known(request, now) or self._take(request, now)
                if held is not None:
                    places = self._table.places(held.uids, request.columns)
                    return Grant(held.token, self.stage, request.holder, places, self._lease_s)
                if now - start >= timeout_s:
                    return self._short_of(request, now - start)
                self._sleep(start + timeout_s - now, now)

    def withdraw(self, request_id: str, uids: np.ndarray | None = None) -> None:
        """Whoever asked was interrupted: what it got, or would get, is offered to others.

        ``uids``: of the rows that it asked room for.
        """
        with self._changed:
            if uids is not None:
                self._room.arrived(uids)
            self._withdrawn = [*self._withdrawn[-MAX_WITHDRAWN:], request_id]
            mine = [held for held in self._leases.open_ones() if held.asked == request_id]
            self._release(mine, "was asked for by a call that was interrupted")

    def _take(self, request: Request, now: float) -> Held | None:
        """A new lease of rows that the sampler chose, if it chose enough."""
        mask = self._table.free(request.partition) & self._table.having(request.columns)
        if np.count_nonzero(mask) < request.least:
            return None
        ready, at = self._table.ready(mask)
        chosen = checked(request.sampler(ready, request.n), len(ready), request.n)
        if len(chosen) < max(1, request.least):
            return None
        held = self._leases.open(ready.uids[chosen], request, now)
        self._table["token"][at[chosen]] = held.token
        return held

    def ack(self, token: int, holder: str) -> tuple[np.ndarray, list[str]]:
        """The holder is done with its lease's rows, which no one gets again.

        Returns the uids consumed by it (none while peers are still at work) and the nodes that
        hold any column of them. Saying it twice is no error.
        """
        with self._changed:
            while (now := self._clock()) < self._frozen_until:
                self._changed.wait(self._frozen_until - now)
            self._expire(now)
            held = self._leases.answer(token, holder, now)
            if held is None or not held.done:
                return np.zeros(0, dtype=np.int64), []
            at = self._table.at(held.uids)
            self._table["consumed"][at] = 1
            self._changed.notify_all()
            return held.uids, self._table.nodes_of(at)

    def nack(self, token: int, holder: str) -> None:
        """The holder gives its rows back; they are offered again at once, to its peers too."""
        with self._changed:
            self._expire(self._clock())
            self._release([self._leases.check(token, holder)], f"was given back by {holder}")

    def renew(self, holder: str) -> list[int]:
        """Heartbeat: the leases of ``holder`` live on; returns the tokens of those that do."""
        with self._changed:
            now = self._clock()
            self._expire(now)
            return self._leases.renew(holder, now)

    def drop(self, holder: str) -> np.ndarray:
        """The holder died: what it held is offered again at once; returns those uids."""
        with self._changed:
            mine = [held for held in self._leases.open_ones() if holder in held.seats]
            return self._release(mine, f"ended because {holder} died")

    def _expire(self, now: float) -> None:
        if over := self._leases.overdue(now):
            self._release(over, "ran out without a heartbeat")
        self._room.expire(now)

    def _release(self, leases: Sequence[Held], why: str) -> np.ndarray:
        """End leases; their rows are offered again."""
        for held in leases:
            logger.info("%s: lease %d of %d rows %s", self.stage, held.token, len(held.uids), why)
            self._leases.close(held.token, why)
            self._table["token"][self._table.at(held.uids)] = 0
        self._changed.notify_all()
        return np.concatenate([np.zeros(0, dtype=np.int64), *(held.uids for held in leases)])

    # ---- state ----

    def consumed(self) -> np.ndarray:
        """Uids of the rows this stage is done with."""
        with self._changed:
            return self._table["uid"][self._table["consumed"] == 1]

    def recommit(self) -> None:
        """Write all leases into the ledger again, which was lost."""
        with self._changed:
            self._leases.recommit()

    def holders(self, uids: np.ndarray) -> dict[str, np.ndarray]:
        """Holder -> those of ``uids`` that it has leased from this stage."""
        with self._changed:
            self._expire(self._clock())
            rows = self._leases.rows_by_holder()
        found = {holder: mine[np.isin(mine, uids)] for holder, mine in rows.items()}
        return {holder: mine for holder, mine in found.items() if len(mine)}

    def freeze(self, *, limit_s: float) -> None:
        """Hold back acknowledgements for at most ``limit_s``, while a snapshot is taken."""
        with self._changed:
            self._frozen_until = self._clock() + limit_s
            self._changed.notify_all()

    def snapshot(self) -> dict[str, Any]:
        """Consumed and leased rows, and the highest token; rows themselves are the warehouses'."""
        with self._changed:
            return self._leases.snapshot() | {"retired": self._arrivals.retired.tolist()}

    def restore(self, notices: Sequence[Notice], state: Mapping[str, Any], *, leased: bool) -> None:
        """Take up rows from the warehouses' notices, and leases from a snapshot or a ledger.

        ``leased``: open leases go on (a controller starts again beside its holders); else their
        rows are offered again (a run starts again without them). Older tokens stay refused.
        """
        with self._changed:
            self._arrivals = Arrivals(state.get("retired", ()), notices)
            held = {}
            for token, lease in state["leases"].items():
                left = lease.uids[self._table.find(lease.uids)[1]]
                if len(left) and (leased or lease.done):
                    held[token] = replace(lease, uids=left)
            self._leases.restore(held, state, self._clock())
            for token, lease in held.items():
                at = self._table.at(lease.uids)
                self._table["consumed"][at] = int(lease.done)
                self._table["token"][at] = token
            self._changed.notify_all()

    def view(self, limit: int | None = None) -> View:
        """The first ``limit`` rows by uid (all without) and who has them; counts of all rows."""
        with self._changed:
            self._expire(self._clock())
            return View.of(self._table, self._leases, limit)

    def _sleep(self, left_s: float, now: float) -> None:
        """Until something changed, or the next lease may run out."""
        until = min(self._leases.next_deadline(), self._room.next_deadline())
        self._changed.wait(max(0.0, min(left_s, until - now)))

    def _short_of(self, request: Request, waited_s: float) -> Shortage:
        free = self._table.free(request.partition)
        missing = self._table.missing(self._table["uid"][free], request.columns)
        short = self._shortage(request.columns, request.n, waited_s, missing)
        ready = int((free & self._table.having(request.columns)).sum())
        return replace(short, rows=int(free.sum()), ready=ready)

    def _shortage(
        self, columns: tuple[str, ...], n: int, waited_s: float, missing: Mapping[str, np.ndarray]
    ) -> Shortage:
        return Shortage(
            stage=self.stage, columns=columns, n=n, waited_s=waited_s, missing=missing,
            leased=self._leases.rows_by_holder(), writers=dict(self._table.writers),
        )  # fmt: skip
