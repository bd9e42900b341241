"""Between the values a caller has and the rows that travel: checks on the way in, a batch out."""

import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.batch import Batch
from rlkit.columns import as_rows, int_array
from rlkit.dock.messages import Places, codes_in
from rlkit.rows import Rows
from rlkit.store import Column, LocalStore, Part, join


def rows_of(name: str, values: Any, uids: np.ndarray, *, copy: bool) -> Rows:
    """One row of ``values`` for each uid; ``copy``: they may go on changing in this process."""
    if isinstance(values, Column):
        values = values.load(uids)
    rows = values if isinstance(values, Rows) else as_rows(name, values, copy=copy)
    if len(rows) != len(uids):
        raise ValueError(f"{name}: got {len(rows)} rows, need {len(uids)}, one a uid.")
    return rows


def meta_of(name: str, values: Any, uids: np.ndarray) -> np.ndarray | None:
    """[N] int64 metadata, one a uid, or None."""
    if values is None:
        return None
    found = int_array(name, values)
    if len(found) != len(uids):
        raise ValueError(f"{name}: got {len(found)} values, need {len(uids)}, one a uid.")
    return found


def uids_of(values: Any) -> np.ndarray:
    """[N] int64, each once."""
    uids = int_array("uid", values)
    if len(np.unique(uids)) < len(uids):
        raise ValueError(f"uids: got {len(uids)} of which some are equal, need one a row.")
    return uids


def stamp_of(holder: str) -> int:
    """Now in ns, the last bits by holder: two holders hardly write at the same stamp."""
    return time.time_ns() & ~0xFFF | zlib.crc32(holder.encode()) & 0xFFF


def handles_of(places: Places, store: Any, told: Sequence[Mapping[str, Sequence[Part]]]) -> Batch:
    """A batch whose values stay where they are, from what warehouses say of them."""
    uids = places.uids
    batch = Batch(uids, store=store, group_ids=places.group_ids, policy_version=places.versions)
    for name in places.at:
        parts = [part for found in told for part in found.get(name, ())]
        batch.columns[name] = Column(name, store, uids, parts)
    return batch


def assemble(places: Places, pulled: Mapping[str, Mapping[str, Rows]]) -> Batch:
    """A batch in this process, from node -> column -> rows."""
    store, uids = LocalStore(), places.uids
    batch = Batch(uids, store=store, group_ids=places.group_ids, policy_version=places.versions)
    for name, codes in places.at.items():
        found = [pulled[places.nodes[code]][name] for code in codes_in(codes)]
        rows = join(found, np.argsort(np.argsort(codes, kind="stable")), name=name)
        batch.columns[name] = Column(name, store, uids, [store.put(name, uids, rows)])
    return batch
