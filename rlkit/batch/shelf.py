"""Rows by key, selectable by uid: the inside of every store."""

import threading

import numpy as np
import torch

from rlkit.batch.rows import Rows


class Shelf:
    """Keeps rows [N] of uids [N] under keys; every method may be called from any thread."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[np.ndarray, np.ndarray, Rows]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, uids: np.ndarray, rows: Rows) -> None:
        """Keep rows under ``key``."""
        order = np.argsort(uids, kind="stable")
        with self._lock:
            self._rows[key] = (uids[order], order, rows)

    def get(self, key: str, uids: np.ndarray) -> Rows:
        """Rows of ``uids`` [N], in that order; KeyError names what is not there."""
        with self._lock:
            if key not in self._rows:
                raise KeyError(
                    f"{key}: these rows were freed, never written, or lost with the process that "
                    "kept them. Run the stage that writes them again."
                )
            known, order, rows = self._rows[key]
        if len(uids) == len(known) and np.array_equal(uids[order], known):
            return rows
        at = np.searchsorted(known, uids)
        at = np.minimum(at, max(len(known) - 1, 0))
        if len(uids) and (not len(known) or not np.array_equal(known[at], uids)):
            missing = sorted(set(uids.tolist()) - set(known.tolist()))[:5]
            raise KeyError(f"{key}: no rows with uid {missing}.")
        return rows.select(torch.from_numpy(order[at]) if len(uids) else torch.zeros(0).long())

    def all_of(self, key: str) -> tuple[np.ndarray, Rows]:
        """All uids [N] and rows of a key that is there."""
        with self._lock:
            known, order, rows = self._rows[key]
        uids = np.empty_like(known)
        uids[order] = known
        return uids, rows

    def free(self, key: str) -> None:
        """Forget the rows of ``key``; unknown keys are no error."""
        with self._lock:
            self._rows.pop(key, None)

    @property
    def nbytes(self) -> int:
        """Bytes of values held."""
        with self._lock:
            return sum(rows.nbytes for _, _, rows in self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)
