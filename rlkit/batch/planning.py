"""Which rows go where: cuts of a batch by group, by tokens, by rank.

Arrays of counts in, positions out.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from rlkit.checks import whole


def by_group(group_ids: np.ndarray) -> list[np.ndarray]:
    """Positions of each group's rows, groups in order of first appearance.

    Group_ids [B] -> list of [G].
    """
    _, first, inverse = np.unique(group_ids, return_index=True, return_inverse=True)
    rows = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    return [rows[i] for i in np.argsort(first, kind="stable")] if len(group_ids) else []


def cut_groups(group_ids: np.ndarray, num: int, *, seed: int) -> list[np.ndarray]:
    """Shuffle whole groups by ``seed`` and cut them into ``num`` lists of positions of near-equal
    group count.
    """
    groups, num = by_group(group_ids), whole("minibatches", num)
    if len(groups) < num:
        raise ValueError(
            f"minibatches: got {num} for {len(groups)} groups, need at most one a group: a group "
            "is never cut. Use fewer minibatches or more prompts."
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(groups))
    return [
        np.sort(np.concatenate([groups[i] for i in part])) for part in np.array_split(order, num)
    ]


def fill(tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Positions in pieces of at most ``budget`` tokens, longest rows first so that a piece holds
    like lengths.
    """
    budget = whole("token_budget", budget, what="token")
    pieces: list[list[int]] = []
    used = budget
    for i in np.argsort(-tokens, kind="stable").tolist():
        if not pieces or used + tokens[i] > budget:
            pieces.append([])
            used = 0
        pieces[-1].append(i)
        used += int(tokens[i])
    return [np.sort(np.asarray(piece, dtype=np.int64)) for piece in pieces]


def allocate(tokens: np.ndarray, budget: int, *, least: int = 1) -> list[np.ndarray]:
    """Positions in pieces of at most ``budget`` tokens: few pieces, of like numbers of rows.

    The longest row left goes to the piece with fewest rows among those that have room; it begins
    one if none has, or if there are fewer than ``least`` pieces (AReaL, 2505.24298, Algorithm 1;
    among equals the one with fewest tokens). A longer row stands alone.
    """
    budget, least = whole("token_budget", budget, what="token"), whole("least", least)
    pieces: list[list[int]] = []
    loads: list[int] = []
    for i in np.argsort(-tokens, kind="stable").tolist():
        room = [p for p, load in enumerate(loads) if load + tokens[i] <= budget]
        if not room or len(pieces) < least:
            room = [len(pieces)]
            pieces.append([])
            loads.append(0)
        piece = min(room, key=lambda p: (len(pieces[p]), loads[p]))
        pieces[piece].append(i)
        loads[piece] += int(tokens[i])
    return [np.sort(np.asarray(piece, dtype=np.int64)) for piece in pieces]


def allocate_evenly(tokens: np.ndarray, budget: int, *, least: int = 1) -> list[np.ndarray]:
    """``allocate``, but as few pieces as the sum of tokens allows, near-equal by
    ``karmarkar_karp``, where that keeps the budget.
    """
    budget = whole("token_budget", budget, what="token")
    num = max(whole("least", least), math.ceil(tokens.sum() / budget))
    pieces = [part for part in karmarkar_karp(tokens, num) if len(part)]
    kept = all(tokens[piece].sum() <= budget or len(piece) == 1 for piece in pieces)
    return pieces if kept else allocate(tokens, budget, least=least)


def karmarkar_karp(tokens: np.ndarray, num: int) -> list[np.ndarray]:
    """Positions in ``num`` parts of near-equal tokens, by largest differencing (Karmarkar and Karp,
    1982).

    Each row begins as a partition of its own, beside empty parts. The two partitions of largest
    spread become one, the heaviest part of one joined with the lightest of the other, until one is
    left. Its heaviest part is at most 4/3 − 1/(3 num) times that of the best partition (Michiels
    et al., 2003), as Graham's of ``balance`` is; in most cases it is lighter than that, not in all.
    """
    num = whole("parts", num)
    empty: list[tuple[int, list[int]]] = [(0, [])] * (num - 1)
    heap = [(-count, i, [(count, [i]), *empty]) for i, count in enumerate(tokens.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, place, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        parts = sorted(((a + b, x + y) for (a, x), (b, y) in pairs), reverse=True)
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], place, parts))
    parts = heap[0][2] if heap else [(0, [])] * num
    return [np.sort(np.asarray(part, dtype=np.int64)) for _, part in parts]


def balance(tokens: np.ndarray, size: int) -> Sequence[np.ndarray]:
    """Positions for each of ``size`` ranks.

    The longest row left goes to the rank with fewest tokens (Graham, 1969).
    """
    loads, parts = np.zeros(size), [[] for _ in range(size)]
    for i in np.argsort(-tokens, kind="stable").tolist():
        rank = min(range(size), key=lambda r: (loads[r], len(parts[r]), r))
        parts[rank].append(i)
        loads[rank] += tokens[i]
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]
