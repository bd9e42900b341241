"""Marks on worker methods that a worker group reads.

The stage's name, and what the driver does before the call.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def stage(name: str, *, column: str | None = None) -> Callable[[Method], Method]:
    """Record calls of the method as spans of stage ``name``.

    ``column`` says that the result is a column of that name over the rows of the first argument: a
    group then returns it at once, still being computed.
    """

    def mark(method: Method) -> Method:
        method.__rlkit_stage__ = name  # type: ignore[attr-defined]
        method.__rlkit_column__ = column  # type: ignore[attr-defined]
        return method

    return mark


def on_driver(prepare: Callable[..., dict[str, Any]]) -> Callable[[Method], Method]:
    """Before a group call, run ``prepare(*args, **kwargs) -> kwargs`` on the driver, once for all
    ranks.
    """

    def mark(method: Method) -> Method:
        method.__rlkit_prepare__ = prepare  # type: ignore[attr-defined]
        return method

    return mark


def stage_of(method: Any, name: str) -> str:
    """The stage a method's calls are recorded under: its mark, or its own name."""
    return getattr(method, "__rlkit_stage__", name)
