"""Arrivals: writes on their way into a controller's table, and uids whose writes come too late."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from rlkit.dock.messages import Kinds, Notice
from rlkit.dock.rowtable import RowTable
from rlkit.dock.uidmap import find

MOST = 1 << 18  # rows: 32 batches of 8,192
CHUNK = 1 << 13


class Retired:
    """The last uids that were added, in sorted chunks, the oldest first."""

    def __init__(self, uids: Iterable[int] = ()) -> None:
        self._chunks: deque[np.ndarray] = deque()
        self.highest = -1
        self.add(np.fromiter(uids, dtype=np.int64))

    def add(self, uids: np.ndarray) -> None:
        """Add uids, and forget the oldest beyond the limit."""
        if not len(uids):
            return
        if self._chunks and len(self._chunks[-1]) + len(uids) <= CHUNK:
            uids = np.concatenate([self._chunks.pop(), uids])
        self._chunks.append(np.sort(uids, kind="stable"))  # quick if they are sorted
        self.highest = max(self.highest, int(self._chunks[-1][-1]))
        while len(self) > MOST and len(self._chunks) > 1:
            self._chunks.popleft()

    def among(self, uids: np.ndarray) -> np.ndarray:
        """[N] whether each of ``uids`` is one of them."""
        hit = np.zeros(len(uids), dtype=bool)
        lowest, highest = (uids.min(), uids.max()) if len(uids) else (0, -1)
        for chunk in self._chunks:
            if chunk[0] <= highest and lowest <= chunk[-1]:
                hit |= find(chunk, uids)[1]
        return hit

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def tolist(self) -> list[int]:
        """All of them, the oldest first."""
        return [uid for chunk in self._chunks for uid in chunk.tolist()]


class Arrivals:
    """The table of one stage's rows and what comes before it; its controller holds the lock."""

    def __init__(self, retired: Iterable[int] = (), notices: Iterable[Notice] = ()) -> None:
        """Take up the rows of ``notices``."""
        self.retired, self._kinds = Retired(retired), Kinds()
        self._rows, self._inbox = RowTable(), []
        for notice in sorted(notices, key=lambda notice: notice.stamp):
            self._rows.write(notice)
            self._kinds.check(notice, lambda _: 0)
        self._highest = int(self._rows["uid"].max(initial=-1))

    @property
    def table(self) -> RowTable:
        """All rows; writes of new ones are entered together when somebody asks."""
        if self._inbox:
            self._rows.extend(self._inbox)
            self._inbox = []
        return self._rows

    def enter(self, notice: Notice) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
        """Uids that came too late; node -> column -> uids whose values there are out of date."""
        uids = notice.uids
        self._kinds.check(notice, lambda name: self._others(name, uids))
        known = max(self._highest, self.retired.highest)
        if len(uids) and uids[0] > known and (uids[1:] > uids[:-1]).all():  # all are new
            self._inbox.append(notice)
            self._highest = int(uids[-1])
            return uids[:0], {}
        self._highest = max(self._highest, int(uids.max(initial=-1)))
        gone = self.retired.among(uids)
        if gone.any():
            notice = notice.at(np.flatnonzero(~gone))
        return uids[gone], self.table.write(notice)

    def _others(self, name: str, uids: np.ndarray) -> int:
        """Rows other than ``uids`` that have a column."""
        has = self.table.having([name])
        has[self.table.at(uids)] = False
        return int(has.sum())
