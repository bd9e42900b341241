"""Values in a node's object store: written once by who puts them, mapped by all who read there."""

from dataclasses import dataclass
from typing import Any

from rlkit.batch.rows import Rows

LEAST_BYTES = 1 << 20
"""Smaller rows travel in the message: an object of their own would cost more than their copy."""


@dataclass(frozen=True, slots=True)
class Handed:
    """Rows that travel as a reference to the object that has them."""

    ref: Any


class SharedRows(Rows):
    """Rows whose memory is an object of the store, which lives as long as they do."""

    __slots__ = ("ref",)
    ref: Any


def shared(value: Any) -> Any:
    """A message to a store: large rows as objects, which the receiver maps."""

    def share(rows: Any) -> Any:
        large = isinstance(rows, Rows) and rows.kind == "ragged" and rows.nbytes >= LEAST_BYTES
        if large and not isinstance(rows, SharedRows):
            import ray

            return Handed(ray.put(rows))
        return handed(rows)

    return _each(share, value)


def handed(value: Any) -> Any:
    """An answer of a store: rows that are objects already as references, others as they are."""
    return _each(lambda x: Handed(x.ref) if isinstance(x, SharedRows) else x, value)


def opened(value: Any) -> Any:
    """What arrived, with the rows in place of references; they are mapped, not copied.

    Of an object that lies on another node a copy comes to this one.
    """

    handed_on: list[Handed] = []
    _each(lambda x: handed_on.append(x) if isinstance(x, Handed) else None, value)
    if not handed_on:
        return value
    import ray

    arrived = iter(ray.get([x.ref for x in handed_on]))  # all at once

    def load(x: Any) -> Any:
        if not isinstance(x, Handed):
            return x
        found: Any = next(arrived)
        rows = SharedRows(found.values, found.lengths)
        object.__setattr__(rows, "ref", x.ref)
        return rows

    return _each(load, value)


def _each(change: Any, value: Any) -> Any:
    """The value, or each of a dict's or list's values, changed."""
    if isinstance(value, dict):
        return {name: change(x) for name, x in value.items()}
    return [change(x) for x in value] if isinstance(value, list) else change(value)
