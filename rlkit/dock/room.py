"""Room: back-pressure of one stage, in rows that wait for it."""

import numpy as np

from rlkit.dock.rowtable import RowTable


class Room:
    """Rows that may wait for a stage; its controller holds the lock.

    A group that has begun may be finished beyond the capacity, or it would hold its room for ever.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._promised: dict[int, tuple[int, float]] = {}  # uid -> group, when it runs out

    def promise(
        self, table: RowTable, uids: np.ndarray, group_ids: np.ndarray, *, until: float
    ) -> bool:
        """Keep room for rows that are about to be written; False if there is too little."""
        if self.capacity is None:
            return True
        live = table["consumed"] == 0
        begun = {group for group, _ in self._promised.values()}
        begun |= set(table["group"][live].tolist())
        new = [
            (uid, group)
            for uid, group in zip(uids.tolist(), group_ids.tolist(), strict=True)
            if uid not in self._promised
        ]
        known = set(table["uid"].tolist())
        new = [(uid, group) for uid, group in new if uid not in known]
        num_new = sum(group not in begun for _, group in new)
        if num_new > self.capacity:
            raise ValueError(
                f"put: got {num_new} new rows, need at most {self.capacity}, the dock's capacity. "
                "Put fewer at a time, or give the dock a larger capacity."
            )
        if self.used(table) + num_new > self.capacity:
            return False
        self._promised |= {uid: (group, until) for uid, group in new}
        return True

    def used(self, table: RowTable) -> int:
        """Rows that wait, promised ones included."""
        return int((table["consumed"] == 0).sum()) + len(self._promised)

    def arrived(self, uids: np.ndarray) -> None:
        """Promised rows came, or will not come."""
        for uid in uids.tolist() if self._promised else ():
            self._promised.pop(uid, None)

    def expire(self, now: float) -> None:
        """Promises of writers that never wrote end."""
        if self._promised:
            self._promised = {u: p for u, p in self._promised.items() if p[1] > now}

    def next_deadline(self) -> float:
        """When the next promise ends."""
        return min((until for _, until in self._promised.values()), default=np.inf)
