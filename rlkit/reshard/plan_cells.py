"""Which pieces go from which rank to which: intersections of two layouts, as arrays.

The rows of a parameter are cut wherever a rank's part begins or ends on either side, and its
experts likewise. Such a piece, a cell, lies in one run on every rank that has it. All layers
between the same two pipeline stages move alike, so they are worked out once.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rlkit.reshard.plan_ranks import Run, Side, itemsize
from rlkit.reshard.plan_tables import Parameter

Receive = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(held [sources, cells], needed [targets, cells]) -> received [targets, cells], all bool."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Cells of a parameter [C]: ranges of experts and of rows (columns if those are cut)."""

    experts: np.ndarray  # [C, 2]
    rows: np.ndarray  # [C, 2]
    nbytes: np.ndarray  # [C]


@dataclass(frozen=True, slots=True)
class Block:
    """Moves that are the same for several layers of one parameter; M moves a layer."""

    parameter: Parameter
    layers: np.ndarray  # [layers]
    grid: Grid
    source: np.ndarray  # [M] ranks of the whole plan
    target: np.ndarray  # [M]
    cell: np.ndarray  # [M]
    needed: np.ndarray  # [M] bool; the rest is received only to be thrown away

    @property
    def nbytes(self) -> np.ndarray:
        """Bytes of each move [M], a layer."""
        return self.grid.nbytes[self.cell]

    @property
    def remote(self) -> np.ndarray:
        """Moves [M] between two devices, not within one."""
        return self.source != self.target


@dataclass(frozen=True, slots=True)
class Cut:
    """One model in two layouts: what a strategy decides on."""

    table: tuple[Parameter, ...]
    train: Side
    infer: Side

    @property
    def disjoint(self) -> bool:
        """The layouts are on different devices."""
        return self.infer.first_rank > 0

    @property
    def num_devices(self) -> int:
        """Devices of both sides."""
        return max(side.first_rank + side.num_ranks for side in (self.train, self.infer))

    def blocks(self, receive: Receive, *, most_bytes: int | None = None) -> tuple[Block, ...]:
        """Moves of all parameters; a cell has at most ``most_bytes``."""
        return tuple(b for p in self.table for b in self._blocks(p, receive, most_bytes))

    def _blocks(self, p: Parameter, receive: Receive, most_bytes: int | None) -> list[Block]:
        grid = make_grid(p, (self.train, self.infer), most_bytes)
        held, needed = (holds(side, p, grid) for side in (self.train, self.infer))
        pairs: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for layer in p.instances:
            key = self.train.stages(p, layer), self.infer.stages(p, layer)
            pairs.setdefault(key, []).append(layer)
        found = []
        for (sources, targets), layers in pairs.items():
            has = held & np.isin(self.train.stage, sources)[:, None]
            wants = needed & np.isin(self.infer.stage, targets)[:, None]
            gets = receive(has, wants) & wants.any(1, keepdims=True)
            source, target, cell = self._match(has, gets)
            needed_here = wants[target - self.infer.first_rank, cell]
            block = Block(p, np.array(layers), grid, source, target, cell, needed_here)
            found.append(block)
        return found

    def _match(
        self, has: np.ndarray, gets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, target, cell) of what targets get: from themselves if they have it, else from
        holders in turn, so that all send alike, neighbours to neighbours.
        """
        shift, size = self.infer.first_rank, min(len(has), len(gets))
        own = np.zeros_like(gets)
        if not shift:
            own[:size] = gets[:size] & has[:size]
        mine, my_cell = np.nonzero(own)
        rest = gets & ~own
        target, cell = np.nonzero(rest)
        holders = np.argsort(~has, axis=0, kind="stable")  # [sources, C]: those that have it first
        turn = (rest.cumsum(0) - 1)[target, cell]
        source = holders[turn * has.sum(0)[cell] // rest.sum(0)[cell], cell]
        return (
            np.concatenate([mine, source]),
            np.concatenate([mine, target]) + shift,
            np.concatenate([my_cell, cell]),
        )


def make_grid(p: Parameter, sides: Sequence[Side], most_bytes: int | None) -> Grid:
    """Cells of a parameter between two sides."""
    inner = prod(p.shape[int(p.experts) :]) * itemsize(p.dtype)  # an expert's, or the tensor's
    runs = [run for side in sides for slot in side.runs[p.name] for run in slot]
    rows = _edges([(run.start, run.stop) for run in runs])
    experts = _edges([pair for side in sides for pair in side.experts(p)])
    if most_bytes is not None:
        a_row = inner // p.shape[p.axis]
        rows = _finer(rows, max(1, most_bytes // a_row))
        experts = _finer(experts, max(1, most_bytes // (a_row * int(np.diff(rows).max()))))
    e, r = (x.reshape(-1) for x in np.indices((len(experts) - 1, len(rows) - 1)))
    experts, rows = (np.stack([x[i], x[i + 1]], 1) for x, i in ((experts, e), (rows, r)))
    sizes = np.diff(experts)[:, 0] * np.diff(rows)[:, 0]
    return Grid(experts, rows, sizes * (inner // p.shape[p.axis]))


def holds(side: Side, p: Parameter, grid: Grid) -> np.ndarray:
    """Which rank has which cell [ranks, C], stages left aside."""
    rows = np.stack([_inside(grid.rows, slot) for slot in side.runs[p.name]])
    experts = np.stack([_inside(grid.experts, [Run(*e, 0)]) for e in side.experts(p)])
    return rows[side.slots(p)] & experts[side.expert_slots(p)]


def _inside(cells: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """Cells [C] that lie in one of the runs."""
    found = np.zeros(len(cells), dtype=bool)
    for run in runs:
        found |= (cells[:, 0] >= run.start) & (cells[:, 1] <= run.stop)
    return found


def _edges(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.unique(np.array(ranges))


def _finer(edges: np.ndarray, step: int) -> np.ndarray:
    """Edges with more between them, so that none are more than ``step`` apart."""
    more = [np.arange(a, b, step) for a, b in itertools.pairwise(edges)]
    return np.concatenate([*more, edges[-1:]])
