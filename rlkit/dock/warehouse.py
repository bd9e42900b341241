"""Warehouse: the values of rows on one node, the notices of their writes, and stages' ledgers."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlkit.batch.rows import Rows, concat
from rlkit.batch.shelf import Shelf
from rlkit.batch.store import Part, join
from rlkit.dock.messages import Facts, Held, Kinds, Notice
from rlkit.dock.traffic import Traffic
from rlkit.dock.uidmap import UidMap


class Warehouse:
    """One node's rows by column and uid; every method may be called from any thread.

    A row is freed when every stage of ``consumers`` is done with it; without consumers, when it is
    cleared.
    """

    def __init__(
        self,
        node: str,
        *,
        consumers: Sequence[str] = (),
        name: str = "dock",
        store: Shelf | None = None,
    ) -> None:
        """``name`` is the dock's; ``store`` has the rows of the node's row store."""
        self.node, self.name, self.consumers = node, name, tuple(consumers)
        self.shelf, self._store = Shelf(), store
        self._lock = threading.RLock()
        self._where: dict[str, UidMap] = {}  # column -> uid -> number of the write
        self._writes: dict[int, Notice] = {}
        self._done = UidMap()  # uid -> a bit for each consumer
        self._stages: dict[str, None] = {}
        self._ledgers: dict[str, dict[str, Any]] = {}
        self._parts: dict[str, Part] = {}  # of writes that were described, by key
        self._traffic, self._kinds = Traffic(), Kinds()
        self._number = 0

    # ---- values ----

    def put(
        self,
        notice: Notice,
        rows: Mapping[str, Rows],
        *,
        source: str | None = None,
        retypes: bool = False,
    ) -> tuple[str, ...]:
        """Keep columns of N rows; returns the stages whose controllers must hear of it.

        ``source``: the node they came from, for the traffic. ``retypes``: the values may be of
        another kind than those whose place they take, as no other row has such.
        """
        with self._lock:
            instead = notice.uids if retypes else notice.uids[:0]
            self._kinds.check(notice, lambda name: self._others(name, instead))
            if source is not None:
                nbytes = sum(values.nbytes for values in rows.values())
                self._traffic.count((notice.stage, source, self.node), nbytes, 1)
            self._number += 1
            self._writes[self._number] = notice
            again = False
            for name, values in rows.items():
                self.shelf.put(f"{name}#{self._number}", notice.uids, values)
                known = self._where.setdefault(name, UidMap())
                again = again or bool((known.get(notice.uids, -1) >= 0).any())
                known.set(notice.uids, self._number)
            if again:
                self._sweep()
            return tuple(self._stages)

    def _others(self, name: str, uids: np.ndarray) -> int:
        """Rows here other than ``uids`` that have a column."""
        return len(np.setdiff1d(self._where.get(name, UidMap()).uids, uids))

    def adopt(
        self, notice: Notice, found: Mapping[str, Sequence[tuple[str, np.ndarray]]]
    ) -> tuple[list[Notice], tuple[str, ...]]:
        """Take over rows of this node's store, column -> (key, uids) of each part.

        Returns the notices of it, and the stages whose controllers must hear of them.
        """
        assert self._store is not None
        entered = []
        for name, parts in found.items():
            uids = np.concatenate([uids for _, uids in parts])
            rows = concat([self._store.get(key, some) for key, some in parts], name=name)
            at = np.argsort(notice.uids, kind="stable")
            mine = notice.at(at[np.searchsorted(notice.uids, uids, sorter=at)])
            entered.append(mine.of({name: Facts.of(rows)}, node=self.node))
            self.put(entered[-1], {name: rows})
        return entered, self.stages()

    def describe(self, wanted: Mapping[str, np.ndarray]) -> dict[str, list[Part]]:
        """Column -> parts that name rows of those uids, for a process that does not want values.

        The node's row store finds them under ``DOCK:COLUMN``.
        """
        found: dict[str, list[Part]] = {}
        with self._lock:
            for name, uids in wanted.items():
                for key, mine in self._plan(name, uids)[0]:
                    if key not in self._parts:
                        known, rows = self.shelf.all_of(key)
                        self._parts[key] = Part(
                            key=f"{self.name}:{name}", place=self.node, uids=known, rows=rows,
                            name=name,
                        )  # fmt: skip
                        self._parts[key].fresh = False  # they are the dock's
                    found.setdefault(name, []).append(self._parts[key].restrict(mine))
        return found

    def fetch(
        self, wanted: Mapping[str, np.ndarray], reader: tuple[str, str] | None = None
    ) -> dict[str, Rows]:
        """Column -> rows of those uids, in that order.

        ``reader``: the stage and the node they go to, for the traffic.
        """
        with self._lock:
            plans = {name: self._plan(name, uids) for name, uids in wanted.items()}
        found = {  # copies are made outside the lock
            name: join([self.shelf.get(key, uids) for key, uids in keys], order, name=name)
            for name, (keys, order) in plans.items()
        }
        if reader is not None:
            moved = Traffic()
            nbytes = sum(rows.nbytes for rows in found.values())
            moved.count((reader[0], self.node, reader[1]), nbytes, 1)
            self.count(moved)
        return found

    def _plan(self, name: str, uids: np.ndarray) -> tuple[list[tuple[str, np.ndarray]], np.ndarray]:
        """Which rows of which write, and the order that sorts the joined answers."""
        numbers = self._where.get(name, UidMap()).get(uids, -1)
        if (numbers < 0).any():
            gone = uids[numbers < 0]
            raise KeyError(
                f"{name}: {len(gone)} of {len(uids)} rows are not on node {self.node}, the first "
                f"with uid {int(gone[0])}: freed when every stage had consumed them, cleared, or "
                "written elsewhere since. Call get or fetch again."
            )
        at = [np.flatnonzero(numbers == number) for number in np.unique(numbers)]
        keys = [(f"{name}#{int(numbers[mine[0]])}", uids[mine]) for mine in at]
        return keys, np.argsort(np.concatenate(at), kind="stable")

    def consumed(self, stage: str, uids: np.ndarray) -> np.ndarray:
        """Note that a stage is done with rows; returns those with which every consumer is."""
        if stage not in self.consumers:
            return np.zeros(0, dtype=np.int64)
        with self._lock:
            held = [known.uids for known in self._where.values()]
            uids = uids[np.isin(uids, np.concatenate(held))] if held else uids[:0]
            bits = self._done.get(uids, 0) | (1 << self.consumers.index(stage))
            self._done.set(uids, bits)
            return uids[bits == (1 << len(self.consumers)) - 1]

    def free(
        self,
        uids: np.ndarray,
        columns: Iterable[str] | None = None,
        *,
        before: int | None = None,
    ) -> None:
        """Forget rows, or some columns of them, or what was written before a stamp.

        Unknown ones are no error.
        """
        with self._lock:
            for name in list(self._where) if columns is None else columns:
                known = self._where.get(name, UidMap())
                known.drop(uids if before is None else self._older(known, uids, before))
            if columns is None:
                self._done.drop(uids)
            self._sweep()

    def _older(self, known: UidMap, uids: np.ndarray, before: int) -> np.ndarray:
        """Those of ``uids`` whose values were written before a stamp."""
        numbers = known.get(uids, -1)
        old = [n for n in np.unique(numbers) if n >= 0 and self._writes[n].stamp < before]
        return uids[np.isin(numbers, old)]

    def _sweep(self) -> None:
        """Free what no row needs, and pack writes of which less than half is needed."""
        needed: dict[str, int] = {}
        for name, known in self._where.items():
            numbers, counts = np.unique(known.values, return_counts=True)
            needed |= {f"{name}#{n}": int(c) for n, c in zip(numbers, counts, strict=True)}
        for number, notice in list(self._writes.items()):
            counts = {name: needed.get(f"{name}#{number}", 0) for name in notice.columns}
            for name in (name for name, count in counts.items() if not count):
                self.shelf.free(f"{name}#{number}")
                self._parts.pop(f"{name}#{number}", None)
            if not any(counts.values()):
                del self._writes[number]
            elif 2 * sum(counts.values()) < len(notice.uids) * len(counts):
                self._pack(number)

    def _pack(self, number: int) -> None:
        """Write the rows that are needed again, each column on its own."""
        for notice in self._notices({number: self._writes.pop(number)}):
            (name,) = notice.columns
            self._number += 1
            rows = self.shelf.get(f"{name}#{number}", notice.uids)
            self.shelf.put(f"{name}#{self._number}", notice.uids, rows)
            self.shelf.free(f"{name}#{number}")
            self._parts.pop(f"{name}#{number}", None)
            self._where[name].set(notice.uids, self._number)
            self._writes[self._number] = notice

    # ---- metadata ----

    def stages(self) -> tuple[str, ...]:
        """Stages whose controllers have asked for the index."""
        with self._lock:
            return tuple(self._stages)

    def index(self, stage: str) -> list[Notice]:
        """Notices of all that lies here; from now on ``put`` names the stage."""
        with self._lock:
            self._stages[stage] = None
            return self._notices(self._writes)

    def _notices(self, writes: Mapping[int, Notice]) -> list[Notice]:
        """A notice a column, of the rows that still need it."""
        found = []
        for number, notice in writes.items():
            for name, facts in notice.columns.items():
                mine = np.flatnonzero(self._where[name].get(notice.uids, -1) == number)
                if len(mine):
                    found.append(replace(notice, columns={name: facts}).at(mine))
        return found

    def commit(self, stage: str, token: int, held: Held | None) -> None:
        """Enter a change of a stage's leases into its ledger, which outlives its controller."""
        with self._lock:
            ledger = self._ledgers.setdefault(stage, {"leases": {}, "last": 0})
            ledger["last"] = max(ledger["last"], token)
            ledger["leases"].pop(token, None)
            if held is not None:
                ledger["leases"][token] = held

    def ledger(self, stage: str) -> dict[str, Any]:
        """Leases of a stage and the highest token, as last committed."""
        with self._lock:
            kept = self._ledgers.get(stage, {"leases": {}, "last": 0})
            return {"leases": dict(kept["leases"]), "last": kept["last"]}

    def count(self, moved: Traffic) -> None:
        """Add a client's traffic to this node's."""
        with self._lock:
            self._traffic.add(moved)

    def traffic(self) -> Traffic:
        """Traffic of the clients on this node."""
        with self._lock:
            return self._traffic.copy()

    def stats(self) -> dict[str, Any]:
        """Node, rows, columns and bytes held."""
        with self._lock:
            held = [known.uids for known in self._where.values() if len(known.uids)]
            return {
                "node": self.node,
                "rows": len(np.unique(np.concatenate(held))) if held else 0,
                "columns": sum(len(known.uids) > 0 for known in self._where.values()),
                "nbytes": self.shelf.nbytes,
            }

    # ---- snapshots ----

    def snapshot(self) -> list[tuple[Notice, Rows, np.ndarray]]:
        """Columns with their values, and the consumers' bits of their rows."""
        with self._lock:
            found = []
            for notice in self._notices(self._writes):
                (name,) = notice.columns
                rows = self.fetch({name: notice.uids})[name]
                found.append((notice, rows, self._done.get(notice.uids, 0)))
            return found

    def restore(self, writes: Iterable[tuple[Notice, Rows, np.ndarray]]) -> None:
        """Forget everything and keep these columns instead."""
        with self._lock:
            for name in list(self._where):
                self._where[name] = UidMap()
            self._sweep()
            self._done = UidMap()
            for notice, rows, done in writes:
                (name,) = notice.columns
                self.put(replace(notice, node=self.node), {name: rows})
                self._done.set(notice.uids, done | self._done.get(notice.uids, 0))
