"""Retired: uids of rows that are gone for good, so that late writes of them are recognised."""

from collections import deque
from collections.abc import Iterable

import numpy as np

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
        self._chunks.append(np.sort(uids))
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
