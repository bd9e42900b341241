"""RowTable: a controller's metadata of all rows, as NumPy arrays sorted by uid."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from rlkit.dock.messages import Notice, Places
from rlkit.dock.samplers import Ready

EMPTY = {"node": -1, "length": -1, "nbytes": 0}
"""What a (fact, column) says of a row that lacks the column."""


class RowTable:
    """R rows: identity, and for each column the node it lies on, its length and its bytes."""

    def __init__(self) -> None:
        none = np.zeros(0, dtype=np.int64)
        names = ("uid", "group", "version", "arrival", "partition", "token", "consumed")
        self.facts: dict[Any, np.ndarray] = dict.fromkeys(names, none)
        self.columns: list[str] = []
        self.nodes: list[str] = []
        self.partitions: list[str] = []
        self.writers: dict[str, str] = {}
        """Column -> the stage that wrote it last."""
        self._arrived = 0

    def __len__(self) -> int:
        return len(self.facts["uid"])

    def __getitem__(self, fact: Any) -> np.ndarray:
        return self.facts[fact]

    def find(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions [N] of uids [N], and whether each is there; other positions mean nothing."""
        return find(self.facts["uid"], uids)

    def at(self, uids: np.ndarray) -> np.ndarray:
        """Positions of those of ``uids`` that are there."""
        at, there = self.find(uids)
        return at[there]

    def write(self, notice: Notice) -> dict[str, dict[str, np.ndarray]]:
        """Enter a write; returns node -> column -> uids whose values there are out of date now."""
        self._grow(notice)
        at = self.at(notice.uids)
        if notice.group_ids is not None:
            self.facts["group"][at] = notice.group_ids
        if notice.versions is not None:
            self.facts["version"][at] = notice.versions
        node, moved = _code(self.nodes, notice.node), {}
        for name, facts in notice.columns.items():
            if name not in self.columns:
                self.columns.append(name)
                for fact, value in EMPTY.items():
                    self.facts[fact, name] = np.full(len(self), value, dtype=np.int64)
            before = self.facts["node", name][at]
            for code in np.unique(before[(before >= 0) & (before != node)]):
                moved.setdefault(self.nodes[code], {})[name] = notice.uids[before == code]
            self.facts["node", name][at] = node
            self.facts["length", name][at] = -1 if facts.lengths is None else facts.lengths
            self.facts["nbytes", name][at] = facts.nbytes
            self.writers[name] = notice.stage
        return moved

    def _grow(self, notice: Notice) -> None:
        new = notice.uids[~self.find(notice.uids)[1]]
        if not len(new):
            return
        added = {
            "uid": new,
            "group": new,
            "arrival": np.arange(self._arrived, self._arrived + len(new)),
            "partition": np.full(len(new), _code(self.partitions, notice.partition)),
        }
        self._arrived += len(new)
        order = np.argsort(np.concatenate([self.facts["uid"], new]), kind="stable")
        for fact, values in self.facts.items():
            more = added.get(fact)
            if more is None:
                more = np.full(len(new), EMPTY[fact[0]] if isinstance(fact, tuple) else 0)
            self.facts[fact] = np.concatenate([values, more])[order]

    def keep(self, mask: np.ndarray) -> None:
        """Only the rows under ``mask`` [R] stay."""
        self.facts = {fact: values[mask] for fact, values in self.facts.items()}

    def having(self, columns: Iterable[str]) -> np.ndarray:
        """[R] whether a row has all of ``columns``."""
        mask = np.ones(len(self), dtype=bool)
        for name in columns:
            mask &= self.facts["node", name] >= 0 if name in self.columns else False
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
            hit |= self.facts["node", name] == self.nodes.index(node)
        return hit

    def copy(self) -> "RowTable":
        """The same table, apart."""
        out = RowTable()
        out.facts = {fact: values.copy() for fact, values in self.facts.items()}
        out.columns, out.nodes = list(self.columns), list(self.nodes)
        out.partitions, out.writers = list(self.partitions), dict(self.writers)
        return out

    def free(self, partition: str) -> np.ndarray:
        """[R] rows of the partition that this stage neither holds nor consumed."""
        if partition not in self.partitions:
            return np.zeros(len(self), dtype=bool)
        mine = self.facts["partition"] == self.partitions.index(partition)
        return mine & (self.facts["token"] == 0) & (self.facts["consumed"] == 0)

    def ready(self, mask: np.ndarray) -> Ready:
        """What samplers see of the rows under ``mask``."""
        at = np.flatnonzero(mask)
        at = at[np.argsort(self.facts["arrival"][at], kind="stable")]
        lengths = {name: self.facts["length", name][at] for name in self.columns}
        tokens = np.zeros(len(at), dtype=np.int64)
        for name in ("prompt_ids", "response_ids"):
            if name in lengths:
                tokens += np.maximum(lengths[name], 0)
        return Ready(
            self.facts["uid"][at], self.facts["group"][at], self.facts["version"][at], tokens,
            lengths,
        )  # fmt: skip

    def places(self, uids: np.ndarray, columns: Iterable[str]) -> Places:
        """Where ``columns`` of rows that are there lie."""
        at = self.at(uids)
        codes = {name: self.facts["node", name][at] for name in columns}
        return Places(
            uids, self.facts["group"][at], self.facts["version"][at], tuple(self.nodes), codes
        )

    def nodes_of(self, uids: np.ndarray) -> list[str]:
        """Nodes that hold any column of these rows."""
        at = self.at(uids)
        codes = {int(c) for name in self.columns for c in np.unique(self.facts["node", name][at])}
        return [self.nodes[code] for code in sorted(codes - {-1})]


def _code(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def find(known: np.ndarray, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions [N] of uids [N] in sorted ``known`` [R], and whether each is there."""
    at = np.searchsorted(known, uids)
    at[at == len(known)] = 0
    return at, (known[at] == uids) if len(known) else np.zeros(len(uids), dtype=bool)
