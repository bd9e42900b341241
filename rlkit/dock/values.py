"""Between the values a caller has and the rows that travel: checks on the way in, a batch out."""

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlkit.batch import Batch
from rlkit.batch.columns import META, as_rows, int_array
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column, LocalStore, Part, join
from rlkit.dock.messages import Places, codes_in

OF_FRAME = ("group", "version", "partition", "bytes")
"""What ``dock.frame()`` says of every row, beside its uid."""


def columns_of(columns: Any) -> Mapping[str, Any]:
    """Columns to write, by name."""
    if not isinstance(columns, Mapping):
        raise TypeError(
            f"columns: got {type(columns).__name__}, need a dict of a column's name to its values."
        )
    names = names_of(columns)
    if not names:
        raise ValueError("columns: got none, need at least one to write.")
    for name in set(META).intersection(names):
        raise ValueError(
            f"columns: got {name!r}, which says what a row is and is no column. Pass it to put: "
            "dock.put(columns, uids, group_ids=..., policy_version=...)."
        )
    for name in names:
        if name in OF_FRAME or name.startswith(("bytes:", "stage:")):
            raise ValueError(
                f"columns: got {name!r}, which dock.frame() says of every row; use another name."
            )
    return columns


def names_of(columns: Any) -> tuple[str, ...]:
    """Names of columns, each once."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise TypeError(f"columns: got {columns!r}, need a list of names: [{columns!r}].")
    return tuple(dict.fromkeys(text("columns", name) for name in columns))


def text(what: str, name: Any) -> str:
    """The name of a column, a stage or a holder."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"{what}: got {name!r}, need a name, a text that is not empty.")
    return name


def node_of(node: Any, nodes: Sequence[str]) -> str:
    """A node that has a warehouse."""
    if node not in nodes:
        raise ValueError(f"node: got {node!r}, need one of {list(nodes)}.")
    return node


def rows_of(name: str, values: Any, uids: np.ndarray, *, copy: bool) -> Rows:
    """One row of ``values`` for each uid; ``copy``: they may go on changing in this process."""
    if isinstance(values, Column):
        values = values.load(uids)
    if isinstance(values, str) or not isinstance(values, Rows | Iterable):
        raise TypeError(
            f"{name}: got {type(values).__name__}, need {len(uids)} values, one a uid: a tensor, a "
            "list, Rows or a Column."
        )
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
    uids = int_array("uid", values if np.size(values) else np.zeros(0, dtype=np.int64))
    known, counts = np.unique(uids, return_counts=True)
    if len(known) < len(uids):
        raise ValueError(
            f"uids: got {len(uids)}, some of them twice: {few(known[counts > 1])}; need one a row."
        )
    return uids


def few(uids: np.ndarray) -> str:
    """At most five uids, and how many more."""
    shown = ", ".join(map(str, uids[:5].tolist()))
    return shown + (f" and {len(uids) - 5} more" if len(uids) > 5 else "")


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
