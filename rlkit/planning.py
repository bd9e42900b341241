"""Which rows go where: cuts of a batch by group, by tokens, by rank.

Arrays of counts in, positions out.
"""

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
            "is never cut. "
            "Use fewer minibatches or more prompts."
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
