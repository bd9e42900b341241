"""Which ready rows a ``get`` hands out: small pure functions ``(rows, n) -> positions``.

They see metadata of the rows that have every column asked for and that nobody holds, in order of
arrival, and return at most ``n`` positions; the controller waits until there are enough. Options
are bound with ``functools.partial``. A group is a column, never a stride: with ``group_size`` a
sampler takes whole groups, those of which that many rows are ready.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.checks import whole


@dataclass(frozen=True, slots=True)
class Ready:
    """Metadata of R rows, in order of arrival."""

    uids: np.ndarray
    group_ids: np.ndarray
    versions: np.ndarray
    tokens: np.ndarray
    """[R] prompt + response tokens of each row."""
    lengths: Mapping[str, np.ndarray]
    """Column -> [R], of every ragged column."""

    def __len__(self) -> int:
        return len(self.uids)


def checked(chosen: object, num_rows: int, n: int) -> np.ndarray:
    """What a sampler returned as positions [M], at most ``n`` of ``num_rows``, each once."""
    at = np.asarray(chosen)
    if at.ndim != 1 or (len(at) and at.dtype.kind not in "iu"):
        raise TypeError(
            f"sampler: got {at.dtype} of shape {at.shape}, need positions [M] of the rows it was "
            "given, whole numbers."
        )
    at = at.astype(np.int64)
    inside = at.view(np.uint64) < num_rows
    seen = np.zeros(num_rows, dtype=bool)
    seen[at if inside.all() else at[inside]] = True
    distinct = np.count_nonzero(seen)
    if len(at) > n or distinct < len(at):
        raise ValueError(
            f"sampler: got {len(at)} positions, {distinct} of them distinct and from 0 to "
            f"{num_rows - 1}; need at most {n}, each once."
        )
    return at


def units(rows: Ready, group_size: int) -> np.ndarray:
    """[U, group_size] positions: whole groups, in the order in which they became whole."""
    group_size = whole("group_size", group_size, what="row")
    if group_size == 1:
        return np.arange(len(rows))[:, None]
    order = np.argsort(rows.group_ids, kind="stable")
    groups = rows.group_ids[order]
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
    counts = np.diff(starts, append=len(order))
    if counts.max(initial=0) > group_size:
        group = int(groups[starts[counts.argmax()]])
        raise ValueError(
            f"group_size: got {group_size}, but {counts.max()} rows of group {group} are ready. "
            "Pass the number of responses a prompt."
        )
    starts = starts[counts == group_size]
    found = order[starts[:, None] + np.arange(group_size)]  # [U, group_size]
    return found[np.argsort(found[:, -1], kind="stable")]


def in_order(rows: Ready, n: int, *, group_size: int = 1) -> np.ndarray:
    """First come, first served."""
    return _first(units(rows, group_size), n)


def whole_groups(rows: Ready, n: int, *, group_size: int) -> np.ndarray:
    """Groups of which all ``group_size`` rows are ready, the first to be whole first."""
    return _first(units(rows, group_size), n)


def oldest_version(rows: Ready, n: int, *, group_size: int = 1) -> np.ndarray:
    """Rows of the oldest policy version first; a group is as old as its oldest row."""
    found = units(rows, group_size)
    return _first(found[np.argsort(rows.versions[found].min(1), kind="stable")], n)


def staleness_bounded(
    rows: Ready, n: int, *, version: int, max_staleness: int, group_size: int = 1
) -> np.ndarray:
    """Oldest first, without groups that have a row older than ``version - max_staleness``.

    Those stay in the dock, where ``frame`` shows them; what becomes of them is the caller's choice.
    """
    found = units(rows, group_size)
    ages = version - rows.versions[found].min(1)
    keep = ages <= max_staleness
    return _first(found[keep][np.argsort(-ages[keep], kind="stable")], n)


def token_balanced(rows: Ready, n: int, *, group_size: int = 1) -> np.ndarray:
    """Rows whose tokens add up to about as much as those of the next calls.

    Deals all that is ready, longest first and back and forth, into hands of ``n`` rows; takes one.
    """
    found = units(rows, group_size)
    size = n // group_size
    hands = max(1, len(found) // size) if size else 1
    order = np.argsort(-rows.tokens[found].sum(1), kind="stable")[: hands * size or len(found)]
    turn, seat = np.divmod(np.arange(len(order)), hands)
    mine = np.where(turn % 2 == 0, seat, hands - 1 - seat) == 0
    return _first(found[np.sort(order[mine])], n)


def seeded_random(rows: Ready, n: int, *, seed: int, group_size: int = 1) -> np.ndarray:
    """In an order that depends on the seed and the groups' ids, not on arrival."""
    found = units(rows, group_size)
    ids = rows.uids if group_size == 1 else rows.group_ids
    keys = _mixed(ids[found[:, 0]] if len(found) else ids[:0], seed)
    return _first(found[np.argsort(keys, kind="stable")], n)


def check_size(sampler: Any, n: int, least: int) -> None:
    """ValueError if a sampler of this file can't put ``least`` rows together of whole groups."""
    if getattr(sampler, "func", None) not in _BY_GROUP:
        return
    size = whole("group_size", sampler.keywords.get("group_size", 1), what="row a group")
    if n // size * size < least:
        raise ValueError(
            f"n: got {n} rows, at least {least} of them, need whole groups of {size}: a multiple "
            f"of {size}, or a smaller least."
        )


_BY_GROUP = (
    in_order, whole_groups, oldest_version, staleness_bounded, token_balanced, seeded_random
)  # fmt: skip


def _first(found: np.ndarray, n: int) -> np.ndarray:
    """The first units that fit into ``n`` rows, as positions [M]."""
    return found[: n // found.shape[1]].reshape(-1)


def _mixed(ids: np.ndarray, seed: int) -> np.ndarray:
    """[N] uint64 that look random: splitmix64 (Steele et al., 2014) of id and seed."""
    step = 0x9E3779B97F4A7C15
    x = ids.astype(np.uint64) * np.uint64(step) + np.uint64((seed + 1) * step**2 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
