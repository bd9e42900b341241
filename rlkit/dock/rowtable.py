"""RowTable: a controller's metadata of all rows, as NumPy arrays in order of arrival."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rlkit.dock.messages import Facts, Notice, Places, codes_in
from rlkit.dock.samplers import Ready

IDENTITY = ("uid", "group", "version", "partition", "token", "consumed")
EMPTY = {"node": -1, "length": -1, "nbytes": 0, "stamp": 0}
"""What a (fact, column) says of a row that lacks the column."""


class RowTable:
    """R rows: identity, and for each column the node it lies on, its length and its bytes."""

    def __init__(self) -> None:
        self._facts: dict[Any, np.ndarray] = {f: np.zeros(64, dtype=np.int64) for f in IDENTITY}
        self._num_rows = 0  # arrays are longer, so that rows are added in amortised constant time
        self._sorted = self._slots = np.zeros(0, dtype=np.int64)  # uids, and their positions
        self.columns: list[str] = []
        self.nodes: list[str] = []
        self.partitions: list[str] = []
        self.writers: dict[str, str] = {}
        """Column -> the stage that wrote it last."""

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, fact: Any) -> np.ndarray:
        return self._facts[fact][: self._num_rows]

    def find(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions [N] of uids [N], and whether each is there; other positions mean nothing."""
        at, there = find(self._sorted, uids)
        return (self._slots[at] if len(self) else at), there

    def at(self, uids: np.ndarray) -> np.ndarray:
        """Positions of those of ``uids`` that are there."""
        at, there = self.find(uids)
        return at[there]

    def write(self, notice: Notice) -> dict[str, dict[str, np.ndarray]]:
        """Enter a write; returns node -> column -> uids whose values there are out of date now.

        Of two writes of one value the later one counts, in whatever order they are heard of: else
        two stages might free the two copies.
        """
        at, there = self.find(notice.uids)
        if not there.all():
            at[~there] = self._add(notice.uids[~there], notice.partition)
        if len(at) and at[-1] - at[0] == len(at) - 1 and (np.diff(at) == 1).all():
            at = slice(at[0], at[-1] + 1)  # quicker than a position a row
        if notice.group_ids is not None:
            self["group"][at] = notice.group_ids
        if notice.versions is not None:
            self["version"][at] = notice.versions
        moved: dict[str, dict[str, np.ndarray]] = {}
        for name, facts in notice.columns.items():
            for code, uids in self._enter(name, facts, at, notice).items():
                moved.setdefault(self.nodes[code], {})[name] = uids
        return moved

    def _enter(
        self, name: str, facts: Facts, at: np.ndarray | slice, notice: Notice
    ) -> dict[int, np.ndarray]:
        """One column of a write; returns node's number -> uids whose values there are stale."""
        if name not in self.columns:
            self.columns.append(name)
            size = len(self._facts["uid"])
            self._facts |= {(f, name): np.full(size, value) for f, value in EMPTY.items()}
        self.writers[name] = notice.stage
        node = _code(self.nodes, notice.node)
        before, newer = self["node", name][at], self["stamp", name][at] <= notice.stamp
        elsewhere = (before >= 0) & (before != node)
        stale = np.where(elsewhere, np.where(newer, before, node), -1) if elsewhere.any() else None
        lengths = np.full(len(newer), -1) if facts.lengths is None else facts.lengths
        known = {"node": node, "length": lengths, "nbytes": facts.nbytes, "stamp": notice.stamp}
        for fact, values in known.items():
            column = self[fact, name]
            column[at] = values if newer.all() else np.where(newer, values, column[at])
        return {} if stale is None else {n: notice.uids[stale == n] for n in codes_in(stale)}

    def _add(self, uids: np.ndarray, partition: str) -> np.ndarray:
        """New rows at the end, without columns; returns their positions."""
        slots = np.arange(self._num_rows, self._num_rows + len(uids))
        self._num_rows += len(uids)
        missing = self._num_rows - len(self._facts["uid"])
        for fact, values in self._facts.items() if missing > 0 else ():
            room = np.full(max(missing, len(values)), _default(fact))
            self._facts[fact] = np.concatenate([values, room])
        self["uid"][slots] = self["group"][slots] = uids
        self["partition"][slots] = _code(self.partitions, partition)
        self._sorted, self._slots = merged(self._sorted, self._slots, uids, slots)
        return slots

    def drop(self, uids: np.ndarray) -> None:
        """Forget rows."""
        keep = np.ones(len(self), dtype=bool)
        keep[self.at(uids)] = False
        self._facts = {f: np.append(self[f][keep], _default(f)) for f in self._facts}
        self._num_rows = int(keep.sum())
        self._slots = np.argsort(self["uid"], kind="stable")
        self._sorted = self["uid"][self._slots]

    def having(self, columns: Iterable[str]) -> np.ndarray:
        """[R] whether a row has all of ``columns``."""
        mask = np.ones(len(self), dtype=bool)
        for name in columns:
            mask &= self["node", name] >= 0 if name in self.columns else False
        return mask

    def missing(self, uids: np.ndarray, columns: Iterable[str]) -> dict[str, np.ndarray]:
        """Column -> those of ``uids`` that lack it."""
        at, there = self.find(uids)
        if not len(self):
            return {name: uids for name in columns if len(uids)}
        lacking = {name: uids[~(there & self.having([name])[at])] for name in columns}
        return {name: found for name, found in lacking.items() if len(found)}

    def on_node(self, node: str) -> np.ndarray:
        """[R] whether a row has a column on ``node``."""
        hit = np.zeros(len(self), dtype=bool)
        for name in self.columns if node in self.nodes else ():
            hit |= self["node", name] == self.nodes.index(node)
        return hit

    def first(self, limit: int | None) -> "RowTable":
        """The first rows by uid, or all of them, in that order and apart from this table."""
        out, at = RowTable(), self._slots[:limit]
        out._facts = {fact: self[fact][at] for fact in self._facts}
        out._num_rows, out._sorted, out._slots = len(at), self._sorted[:limit], np.arange(len(at))
        out.columns, out.nodes = list(self.columns), list(self.nodes)
        out.partitions, out.writers = list(self.partitions), dict(self.writers)
        return out

    def free(self, partition: str) -> np.ndarray:
        """[R] rows of the partition that this stage neither holds nor consumed."""
        if partition not in self.partitions:
            return np.zeros(len(self), dtype=bool)
        mine = self["partition"] == self.partitions.index(partition)
        return mine & (self["token"] == 0) & (self["consumed"] == 0)

    def ready(self, mask: np.ndarray) -> tuple[Ready, np.ndarray]:
        """What samplers see of the rows under ``mask``, and the positions of those."""
        at = np.flatnonzero(mask)
        lengths = {name: self["length", name][at] for name in self.columns}
        tokens = np.zeros(len(at), dtype=np.int64)
        for name in ("prompt_ids", "response_ids"):
            if name in lengths:
                tokens += np.maximum(lengths[name], 0)
        found = Ready(self["uid"][at], self["group"][at], self["version"][at], tokens, lengths)
        return found, at

    def places(self, uids: np.ndarray, columns: Iterable[str]) -> Places:
        """Where ``columns`` of rows that are there lie."""
        at = self.at(uids)
        codes = {name: self["node", name][at] for name in columns}
        return Places(uids, self["group"][at], self["version"][at], tuple(self.nodes), codes)

    def nodes_of(self, at: np.ndarray) -> list[str]:
        """Nodes that hold any column of the rows at these positions."""
        codes = {code for name in self.columns for code in codes_in(self["node", name][at])}
        return [self.nodes[code] for code in sorted(codes)]


def _code(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def merged(
    known: np.ndarray, values: np.ndarray, uids: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ``known`` [R] and its values [R], with other ``uids`` [N] and their values [N]."""
    both, all_values = np.concatenate([known, uids]), np.concatenate([values, new])
    if (np.diff(both[max(0, len(known) - 1) :]) > 0).all():  # as most uids come: in order
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


def _default(fact: Any) -> int:
    return EMPTY[fact[0]] if isinstance(fact, tuple) else 0
