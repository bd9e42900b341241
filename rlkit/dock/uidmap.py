"""Uids as sorted arrays: finding them, adding some, and a map from them."""

import numpy as np


class UidMap:
    """uid -> int64, as sorted arrays."""

    def __init__(self) -> None:
        self.uids = self.values = np.zeros(0, dtype=np.int64)

    def get(self, uids: np.ndarray, default: int) -> np.ndarray:
        """Values [N] of uids [N]."""
        at, there = find(self.uids, uids)
        return np.where(there, self.values[at], default) if len(self.uids) else there + default

    def set(self, uids: np.ndarray, values: np.ndarray | int) -> None:
        """Enter values [N] of uids [N]."""
        self.drop(uids)
        new = np.broadcast_to(np.asarray(values, dtype=np.int64), uids.shape)
        self.uids, self.values = merged(self.uids, self.values, uids, new)

    def drop(self, uids: np.ndarray) -> None:
        """Forget uids."""
        if len(self.uids):
            at, there = find(self.uids, uids)
            if there.any():
                keep = np.ones(len(self.uids), dtype=bool)
                keep[at[there]] = False
                self.uids, self.values = self.uids[keep], self.values[keep]


def merged(
    known: np.ndarray, values: np.ndarray, uids: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ``known`` [R] and its values [R], with other ``uids`` [N] and their values [N]."""
    both, all_values = np.concatenate([known, uids]), np.concatenate([values, new])
    end = both[max(0, len(known) - 1) :]
    if (end[1:] > end[:-1]).all():  # as most uids come: in order
        return both, all_values
    order = np.argsort(both, kind="stable")
    return both[order], all_values[order]


def find(known: np.ndarray, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions [N] of uids [N] in sorted ``known`` [R], and whether each is there."""
    if len(uids) == len(known) and np.array_equal(known, uids):  # all of them, in order
        return np.arange(len(known)), np.ones(len(known), dtype=bool)
    at = np.searchsorted(known, uids)
    at[at == len(known)] = 0
    return at, (known[at] == uids) if len(known) else np.zeros(len(uids), dtype=bool)
