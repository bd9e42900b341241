"""Where the values of a batch lie: parts, columns, and the store of one process.

A **part** is one write of one column: a key, the rows it covers, and what planning needs to know of
them (lengths, sums), never the values. A **column** is the parts of all rows of a batch, perhaps
still being computed. A store keeps the values; it is in memory here, one actor a node on a cluster.
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlkit import trace
from rlkit.batch.rows import Rows, concat
from rlkit.batch.shelf import Shelf
from rlkit.shield import when_collected
from rlkit.types import RowStore

_keys = itertools.count()


class Part:
    """One write of one column: which rows, where, how long; the values stay in the store.

    uids [N] int64; lengths [N] int64 or None (scalars, objects); sums [N] float64 or None (only of
    masks). The process that owns a part frees its values when nothing names it any more.
    """

    __slots__ = (
        "__weakref__", "base", "dtype", "fresh", "key", "kind", "lengths", "nbytes", "place",
        "sums", "uids",
    )  # fmt: skip

    def __init__(self, *, key: str, place: str, uids: np.ndarray, rows: Rows, name: str) -> None:
        self.key, self.place, self.uids = key, place, uids
        self.kind, self.nbytes = rows.kind, rows.nbytes
        self.dtype = "object" if rows.kind == "objects" else str(rows.tensor.dtype)[6:]
        self.lengths = None if rows.lengths is None else rows.lengths.numpy()
        self.sums = rows.sums().numpy() if name.endswith("_mask") else None
        self.fresh = True  # no process owns its rows yet
        self.base: Part | None = None  # the owned part that this one is a piece of

    def restrict(self, uids: np.ndarray) -> "Part":
        """The piece that covers ``uids`` [M], some of this part's; the same rows in the store."""
        if len(uids) == len(self.uids) and np.array_equal(uids, self.uids):
            return self
        sorter = np.argsort(self.uids, kind="stable")
        at = sorter[np.searchsorted(self.uids, uids, sorter=sorter)]
        piece = copy.copy(self)
        piece.uids, piece.base, piece.fresh = uids, self.base or self, False
        piece.lengths = None if self.lengths is None else self.lengths[at]
        piece.sums = None if self.sums is None else self.sums[at]
        piece.nbytes = self.nbytes * len(uids) // max(1, len(self.uids))
        return piece

    def __getstate__(self) -> dict[str, Any]:
        kept = [name for name in self.__slots__ if name not in ("__weakref__", "base")]
        return {name: getattr(self, name) for name in kept} | {"base": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"Part({self.key}, {len(self.uids)} rows, {self.kind} {self.dtype}, at {self.place})"


def new_key(name: str, owner: str) -> str:
    """A key no other write of this process has; ``owner`` tells processes apart."""
    return f"{name}#{owner}.{next(_keys)}"


class LocalStore:
    """A row store in this process's memory."""

    place = "local"

    def __init__(self) -> None:
        self.shelf = Shelf()

    def put(self, name: str, uids: np.ndarray, rows: Rows) -> Part:
        """Keep rows [N] of ``uids``; they live until the returned part is garbage."""
        key = new_key(name, "local")
        part = Part(key=key, place=self.place, uids=uids, rows=rows, name=name)
        self.shelf.put(key, uids, rows)
        part.fresh = False
        when_collected(part, self.shelf.free, key)
        return part

    def put_all(self, uids: np.ndarray, columns: Mapping[str, Rows]) -> dict[str, Part]:
        """``put`` of several columns of the same rows."""
        return {name: self.put(name, uids, rows) for name, rows in columns.items()}

    def fetch(self, requests: Sequence[tuple[Part, np.ndarray]]) -> list[Rows]:
        """For each (part, uids [N]) the rows of those uids, in order."""
        return [self.shelf.get(part.key, uids) for part, uids in requests]

    def apply(self, call: Callable[[Any], Rows], batch: Any, name: str) -> "Column":
        """Run ``call(batch) -> rows`` where the rows lie (here: in this process)."""
        with trace.current().span(trace.label(name), rows=len(batch)):
            part = self.put(name, batch.uids, call(batch))
        return Column(name, self, batch.uids, [part])

    def __reduce__(self) -> Any:
        raise TypeError(
            "this batch lives in the memory of one process and can't be sent as it is. Pass it "
            "to a method of a "
            "worker group (the group copies it to the cluster), or send batch.frame()."
        )


class Column:
    """Values of B rows in a store, perhaps still being computed.

    Bind it with ``batch["name"] = column``.
    """

    def __init__(
        self,
        name: str,
        store: RowStore,
        uids: np.ndarray,
        parts: Sequence[Part] | Callable[[], Sequence[Part]],
        *,
        expands: bool = False,
    ) -> None:
        self.name, self.store, self.uids, self.expands = name, store, uids, expands
        self.outdated: Sequence[str] = ()  # what spoke of the rewards before these goes with them
        self._parts = parts
        self._copies: dict[int, Column] = {}  # in other stores, by id of the store

    @property
    def parts(self) -> Sequence[Part]:
        """The parts, waiting for the stage that writes them if it still runs."""
        if callable(self._parts):
            self._parts = list(self._parts())
        return self._parts

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for the values yet."""
        return callable(self._parts)

    def expanded(self) -> "Column":
        """The same [B] values, to be spread over the response mask where they are read."""

        def parts() -> Sequence[Part]:
            kind = "a value a token" if self.expands else next((p.kind for p in self.parts), "")
            if kind not in ("scalar", ""):
                raise ValueError(
                    f"expand: got column {self.name!r} of {kind} rows, need one number a response. "
                    "What is [B, T] already is bound as it is."
                )
            return self.parts

        known = parts if self.pending else parts()
        return Column(self.name, self.store, self.uids, known, expands=True)

    def on(self, store: RowStore) -> "Column":
        """The same values in ``store``: itself if they are there, else a copy, made once."""
        if self.store is store:
            return self
        if id(store) not in self._copies:
            part = store.put(self.name, self.uids, self.load())
            self._copies[id(store)] = Column(
                self.name, store, self.uids, [part], expands=self.expands
            )
        return self._copies[id(store)]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": list(self.parts), "_copies": {}}

    def requests(self, uids: np.ndarray) -> tuple[list[tuple[Part, np.ndarray]], np.ndarray]:
        """What to fetch for ``uids``, and the order that sorts the joined answers."""
        if len(self.parts) == 1 and np.array_equal(self.parts[0].uids, uids):
            return [(self.parts[0], uids)], np.arange(len(uids))
        wanted, positions = [], []
        left = np.ones(len(uids), dtype=bool)
        for part in self.parts:
            mine = left & np.isin(uids, part.uids)
            if mine.any():
                at = np.flatnonzero(mine)
                wanted.append((part, uids[at]))
                positions.append(at)
                left &= ~mine
        if left.any():
            raise KeyError(
                f"{self.name}: {int(left.sum())} of {len(uids)} rows have no value, the first with "
                f"uid {int(uids[left][0])}. Run the stage that writes {self.name!r} on this batch."
            )
        if not wanted and self.parts:  # an empty batch still has a kind and a dtype
            wanted, positions = [(self.parts[0], uids)], [np.zeros(0, dtype=np.int64)]
        order = np.argsort(np.concatenate(positions) if positions else np.zeros(0), kind="stable")
        return wanted, order

    def load(self, uids: np.ndarray | None = None) -> Rows:
        """Fetch the values of ``uids`` [N] (default: all rows) as unpadded rows."""
        uids = self.uids if uids is None else uids
        wanted, order = self.requests(uids)
        return join(self.store.fetch(wanted), order, name=self.name)

    def measure(self, uids: np.ndarray, what: str) -> np.ndarray:
        """Planning facts of ``uids`` [N] without touching values.

        ``what`` is ``lengths`` or ``sums``.
        """
        wanted, order = self.requests(uids)
        found = []
        for part, some in wanted:
            facts = getattr(part, what)
            if facts is None and what == "sums" and part.kind == "ragged":
                # a mask written under another name, by batch.apply for instance
                found.append(self.store.fetch([(part, some)])[0].sums().numpy())
                continue
            if facts is None:
                raise TypeError(f"{self.name}: {part.kind} rows have no {what}.")
            sorter = np.argsort(part.uids, kind="stable")
            found.append(facts[sorter[np.searchsorted(part.uids, some, sorter=sorter)]])
        return np.concatenate(found)[order] if found else np.zeros(0, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts, rows outside the batch included; 0 while pending."""
        return 0 if self.pending else sum(part.nbytes for part in self.parts)

    def facts(self) -> dict[str, str]:
        """What is known without waiting: name, kind, bytes, where."""
        if self.pending or not self.parts:
            return {"column": self.name, "kind": "pending", "bytes": "", "where": ""}
        part, places = self.parts[0], sorted({part.place[:8] for part in self.parts})
        kind = part.kind if part.kind == "objects" else f"{part.kind} {part.dtype}"
        kind += " (expands)" if self.expands else ""
        where = ", ".join(places[:4])
        return {"column": self.name, "kind": kind, "bytes": f"{self.nbytes:,}", "where": where}

    def __len__(self) -> int:
        return len(self.uids)

    def __repr__(self) -> str:
        state = "pending" if self.pending else f"{self.nbytes:,} bytes"
        return f"Column({self.name!r}, {len(self.uids)} rows, {state})"


def join(found: Sequence[Rows], order: np.ndarray, *, name: str) -> Rows:
    """Concatenate fetched rows and put them back into the order asked for."""
    rows = concat(found, name=name)
    if np.array_equal(order, np.arange(len(order))):
        return rows
    return rows.select(torch.from_numpy(order))
