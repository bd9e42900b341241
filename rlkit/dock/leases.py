"""Leases: a controller's book of who holds which rows, and what ended why."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit.dock.messages import Held, Request, StaleLeaseError
from rlkit.dock.uidmap import find

MAX_ENDED = 1000  # ended leases whose end can still be explained


class Leases:
    """The leases of one stage by token; its controller holds the lock."""

    def __init__(
        self, stage: str, *, lease_s: float, commit: Callable[[int, Held | None], Any]
    ) -> None:
        self.stage, self.lease_s, self._commit = stage, lease_s, commit
        self._held: dict[int, Held] = {}
        self._keys: dict[tuple[Any, ...], int] = {}
        self._ended: dict[int, str] = {}
        self._last = 0

    def open(self, uids: np.ndarray, request: Request, now: float) -> Held:
        """A new lease of ``uids`` under a token higher than all before."""
        self._last += 1
        seats, peers = {request.holder: now + self.lease_s}, request.peers
        if peers is not None and peers.size > 1:
            seats[""] = now + self.lease_s
        held = Held(
            token=self._last, uids=uids, seats=seats, size=peers.size if peers else 1,
            key=(peers.group, peers.call) if peers else None, asked=request.id,
        )  # fmt: skip
        self._keep(held)
        return held

    def known(self, request: Request, now: float) -> Held | None:
        """The lease that a peer of the holder opened for this call; or this very request, which
        comes again if the controller died before it answered.
        """
        if request.peers is None:
            mine = (held for held in self.open_ones() if held.asked == request.id != "")
            return next(mine, None)
        token = self._keys.get((request.peers.group, request.peers.call))
        if token is None or self._held[token].done:
            return None
        held, holder = self._held[token], request.holder
        seats = held.seats | {holder: now + self.lease_s}
        if len(seats) - ("" in seats) >= held.size:
            seats.pop("", None)
        if len(seats) > held.size:
            raise ValueError(
                f"peers: {holder} asks for call {request.peers.call} of group "
                f"{request.peers.group!r}, which {sorted(held.seats)} have; need at most "
                f"{held.size} processes. Give every model-parallel group a name of its own."
            )
        self._keep(replace(held, seats=seats))
        return self._held[token]

    def check(self, token: int, holder: str) -> Held:
        """The open lease of that token; StaleLeaseError if it ended or is someone else's."""
        held = self._held.get(token)
        if held is None or held.done or holder not in held.seats:
            why = self._ended.get(token, "is not one of its own")
            why = DONE if held is not None and held.done else why
            raise StaleLeaseError(
                f"{self.stage}: {holder} answers for lease {token}, which {why}. Its rows may be "
                "in other hands: throw the result away and call get again."
            )
        return held

    def answer(self, token: int, holder: str, now: float) -> Held | None:
        """Enter an acknowledgement; None if that lease was acknowledged before and is forgotten."""
        held = self._held.get(token)
        if self._ended.get(token) == DONE:
            return None
        if held is not None and holder in held.acked:
            return held
        held = self.check(token, holder)
        self._keep(replace(held, acked=held.acked | {holder}))
        return self._held[token]

    def renew(self, holder: str, now: float) -> list[int]:
        """Heartbeat of a holder; tokens of its open leases."""
        mine = [held for held in self.open_ones() if holder in held.seats]
        for held in mine:
            held.seats[holder] = now + self.lease_s
        return [held.token for held in mine]

    def close(self, token: int, why: str) -> None:
        """End a lease."""
        held = self._held.pop(token, None)
        if held is not None and held.key is not None and self._keys.get(held.key) == token:
            del self._keys[held.key]
        self._explain(token, why)
        self._commit(token, None)

    def forget(self, uids: np.ndarray) -> None:
        """Take rows out of their leases; a lease without rows ends."""
        uids = np.sort(uids, kind="stable")
        for token, held in list(self._held.items()):
            left = held.uids[~find(uids, held.uids)[1]]
            if not len(left):
                self.close(token, DONE if held.done else "lost its rows, which were cleared")
            elif len(left) < len(held.uids):
                self._keep(replace(held, uids=left))

    def recommit(self) -> None:
        """Write the whole ledger again."""
        for token, held in self._held.items():
            self._commit(token, replace(held, seats=dict(held.seats)))
        self._commit(self._last, self._held.get(self._last))

    def open_ones(self) -> list[Held]:
        """Leases that not all peers have acknowledged."""
        return [held for held in self._held.values() if not held.done]

    def overdue(self, now: float) -> list[Held]:
        """Open leases of which a holder's heartbeat is out."""
        return [held for held in self.open_ones() if held.deadline <= now]

    def next_deadline(self) -> float:
        """When the next lease may run out."""
        return min((held.deadline for held in self.open_ones()), default=np.inf)

    def rows_by_holder(self) -> dict[str, np.ndarray]:
        """Holder -> uids it has."""
        found: dict[str, list[np.ndarray]] = {}
        for held in self.open_ones():
            for holder in held.seats.keys() - held.acked - {""}:
                found.setdefault(holder, []).append(held.uids)
        return {holder: np.concatenate(mine) for holder, mine in found.items()}

    def snapshot(self) -> dict[str, Any]:
        """All leases and the highest token."""
        held = {token: replace(h, seats=dict(h.seats)) for token, h in self._held.items()}
        return {"leases": held, "last": self._last}

    def restore(self, held: Mapping[int, Held], state: Mapping[str, Any], now: float) -> None:
        """Take up those leases of a snapshot or ledger that go on.

        Their holders have a whole lease time to show up.
        """
        for token in (self._held.keys() | state["leases"].keys()) - held.keys():
            self.close(token, "ended when the dock was restored")
        self._held, self._keys = {}, {}
        self._last = max(self._last, state["last"])
        for lease in held.values():
            self._keep(replace(lease, seats=dict.fromkeys(lease.seats, now + self.lease_s)))

    def _keep(self, held: Held) -> None:
        self._commit(held.token, replace(held, seats=dict(held.seats)))
        self._held[held.token] = held
        if held.key is not None:
            self._keys[held.key] = held.token

    def _explain(self, token: int, why: str) -> None:
        self._ended[token] = why
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]


DONE = "was acknowledged"
