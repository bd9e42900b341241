"""RowTable: a controller's metadata of all rows, as NumPy arrays in order of arrival."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlkit.dock.messages import Facts, Notice, Places, codes_in
from rlkit.dock.samplers import Ready
from rlkit.dock.uidmap import find, merged

IDENTITY = ("uid", "group", "version", "partition", "token", "consumed")
EMPTY = {"node": -1, "length": -1, "nbytes": 0, "stamp": 0}
"""What a (fact, column) says of a row that lacks the column."""
LINES = np.asarray([*EMPTY.values()])[:, None]


class RowTable:
    """R rows: identity, and for each column the node it lies on, its length and its bytes."""

    def __init__(self) -> None:
        self._lines: dict[Any, int] = {fact: line for line, fact in enumerate(IDENTITY)}
        # Longer than the rows, so that some are added in amortised constant time.
        self._facts = np.zeros((len(IDENTITY), 64), dtype=np.int64)
        self._num_rows = 0
        self._sorted = self._slots = np.zeros(0, dtype=np.int64)  # uids, and their positions
        self.columns: list[str] = []
        self.nodes: list[str] = []
        self.partitions: list[str] = []
        self.writers: dict[str, str] = {}
        """Column -> the stage that wrote it last."""

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, fact: Any) -> np.ndarray:
        return self._facts[self._lines[fact], : self._num_rows]

    def find(self, uids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions [N] of uids [N], and whether each is there; other positions mean nothing."""
        at, there = find(self._sorted, uids)
        return (self._slots[at] if len(self) else at), there

    def at(self, uids: np.ndarray) -> np.ndarray | slice:
        """Positions of those of ``uids`` that are there; a slice, which is quicker, of one run."""
        if len(uids) and len(self):
            start = int(self._slots[np.searchsorted(self._sorted[:-1], uids[0])])
            run = slice(start, start + len(uids))
            if np.array_equal(self["uid"][run], uids):
                return run
        at, there = self.find(uids)
        return at[there]

    def write(self, notice: Notice) -> dict[str, dict[str, np.ndarray]]:
        """Enter a write; returns node -> column -> uids whose values there are out of date now.

        Of two writes of one value the later one counts, in whatever order they are heard of: else
        two stages might free the two copies.
        """
        _, there = self.find(notice.uids)
        if not there.all():
            self._add(notice.uids[~there], notice.partition)
        at = self.at(notice.uids)
        if notice.group_ids is not None:
            self["group"][at] = notice.group_ids
        if notice.versions is not None:
            self["version"][at] = notice.versions
        moved: dict[str, dict[str, np.ndarray]] = {}
        for name, facts in notice.columns.items():
            for code, uids in self._enter(name, facts, at, notice).items():
                moved.setdefault(self.nodes[code], {})[name] = uids
        return moved

    def extend(self, notices: Iterable[Notice]) -> None:
        """Enter writes of rows that are all new, those of one kind together."""
        for _, some in itertools.groupby(notices, key=_kind):
            alike = list(some)
            first, sizes = alike[0], [len(notice.uids) for notice in alike]
            uids = _all_of([notice.uids for notice in alike])
            at = self._add(uids, first.partition, filled=first.columns)
            if first.group_ids is not None:
                self["group"][at] = _all_of([notice.group_ids for notice in alike])
            if first.versions is not None:
                self["version"][at] = _all_of([notice.versions for notice in alike])
            nodes = np.asarray([_code(self.nodes, notice.node) for notice in alike])
            stamps = np.asarray([notice.stamp for notice in alike])
            if len(alike) > 1:  # else one serves all rows
                nodes, stamps = np.repeat(nodes, sizes), np.repeat(stamps, sizes)
            for name in first.columns:
                facts = [notice.columns[name] for notice in alike]
                self._open(name, first.stage)
                self["node", name][at], self["stamp", name][at] = nodes, stamps
                self["nbytes", name][at] = _all_of([each.nbytes for each in facts])
                self["length", name][at] = _all_of([_lengths(each) for each in facts])

    def _open(self, name: str, stage: str) -> None:
        """Know a column, and who writes it."""
        if name not in self.columns:
            self.columns.append(name)
            self._lines |= {(fact, name): len(self._lines) + i for i, fact in enumerate(EMPTY)}
            lines = np.repeat(LINES, self._facts.shape[1], axis=1)
            self._facts = np.concatenate([self._facts, lines])
        self.writers[name] = stage

    def _enter(
        self, name: str, facts: Facts, at: np.ndarray | slice, notice: Notice
    ) -> dict[int, np.ndarray]:
        """One column of a write; returns node's number -> uids whose values there are stale."""
        self._open(name, notice.stage)
        node, stale = _code(self.nodes, notice.node), None
        known = {"node": node, "length": _lengths(facts), "nbytes": facts.nbytes}
        known["stamp"] = notice.stamp
        before = self["node", name][at]
        if (before >= 0).any():
            newer = self["stamp", name][at] <= notice.stamp
            stale = np.where(before == node, -1, np.where(newer, before, node))
            stale[before < 0] = -1
            known = {f: np.where(newer, x, self[f, name][at]) for f, x in known.items()}
        for fact, values in known.items():
            self[fact, name][at] = values
        return {} if stale is None else {n: notice.uids[stale == n] for n in codes_in(stale)}

    def _add(self, uids: np.ndarray, partition: str, *, filled: Iterable[str] = ()) -> slice:
        """New rows at the end, without columns; returns their positions.

        Columns of ``filled`` are left to the caller.
        """
        at = slice(self._num_rows, self._num_rows + len(uids))
        lines, size = self._facts.shape
        if at.stop > size:
            room = np.empty((lines, max(at.stop - size, size)), dtype=np.int64)
            self._facts = np.concatenate([self._facts, room], axis=1)
        self._num_rows = at.stop
        self._facts[: len(IDENTITY), at] = 0
        for name in set(self.columns).difference(filled):
            line = self._lines["node", name]
            self._facts[line : line + len(EMPTY), at] = LINES
        self["uid"][at] = self["group"][at] = uids
        self["partition"][at] = _code(self.partitions, partition)
        slots = np.arange(at.start, at.stop)
        self._sorted, self._slots = merged(self._sorted, self._slots, uids, slots)
        return at

    def drop(self, uids: np.ndarray) -> None:
        """Forget rows."""
        keep = np.ones(len(self), dtype=bool)
        keep[self.at(uids)] = False
        left = np.flatnonzero(keep)
        self._facts[:, : len(left)] = self._facts[:, left]  # in place: memory stays for the next
        self._num_rows = len(left)
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
        out._lines, out._facts = dict(self._lines), self._facts[:, at]
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
        one_run = len(at) and at[-1] - at[0] == len(at) - 1
        some = slice(at[0], at[-1] + 1) if one_run else at
        lengths = {name: self._copy(("length", name), some) for name in self.columns}
        tokens = np.zeros(len(at), dtype=np.int64)
        for name in ("prompt_ids", "response_ids"):
            if name in lengths:
                tokens += np.maximum(lengths[name], 0)
        uids, groups, versions = (self._copy(fact, some) for fact in ("uid", "group", "version"))
        return Ready(uids, groups, versions, tokens, lengths), at

    def _copy(self, fact: Any, at: np.ndarray | slice) -> np.ndarray:
        """One fact of the rows at these positions, apart from this table."""
        found = self[fact][at]
        return found.copy() if isinstance(at, slice) else found

    def places(self, uids: np.ndarray, columns: Iterable[str]) -> Places:
        """Where ``columns`` of rows that are there lie."""
        at = self.at(uids)
        codes = {name: self._copy(("node", name), at) for name in columns}
        groups, versions = self._copy("group", at), self._copy("version", at)
        return Places(uids, groups, versions, tuple(self.nodes), codes)

    def nodes_of(self, at: np.ndarray | slice) -> list[str]:
        """Nodes that hold any column of the rows at these positions."""
        codes, before = set(), None
        for name in self.columns:
            where = self["node", name][at]
            if before is None or not np.array_equal(where, before):  # columns often lie together
                codes.update(codes_in(where))
            before = where
        return [self.nodes[code] for code in sorted(codes)]


def _kind(notice: Notice) -> tuple[Any, ...]:
    """What writes that are entered together have in common."""
    given = notice.group_ids is None, notice.versions is None
    return notice.stage, notice.partition, given, tuple(notice.columns)


def _all_of(arrays: Sequence[Any]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _lengths(facts: Facts) -> np.ndarray:
    return np.full(len(facts.nbytes), -1) if facts.lengths is None else facts.lengths


def _code(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)
