"""Source lines of functions that came by value, so that tracebacks can show them."""

import functools
import inspect
import linecache
import threading
import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Any, NamedTuple


class Lines(NamedTuple):
    """Where a function or class was written."""

    name: str
    """Its qualified name."""
    first: int
    """Its first line in its file or cell."""
    text: str
    """Its source."""


_parsing = threading.Lock()
_classes: weakref.WeakKeyDictionary[type, tuple[list[str], int]] = weakref.WeakKeyDictionary()


def source_lines(value: Any) -> tuple[list[str], int]:
    """``inspect.getsourcelines`` in any thread: for a class it parses the class's file, and Python
    3.11 counts the parser's depth for all threads together (another's parsing: SystemError).

    OSError or TypeError where there is no source. A class's is found once.
    """
    if not inspect.isclass(value):
        return inspect.getsourcelines(value)
    with _parsing:
        if value not in _classes:
            try:
                _classes[value] = inspect.getsourcelines(value)
            except SystemError:  # somebody parsed without this lock; not a second time
                _classes[value] = inspect.getsourcelines(value)
        return _classes[value]


def lines_of(values: Iterable[Any]) -> tuple[Lines, ...]:
    """Lines of the functions and classes among ``values`` whose source is known."""
    found = []
    for value in values:
        if not hasattr(value, "__qualname__"):
            continue
        try:
            rows, first = source_lines(value)
        except (OSError, TypeError):
            continue
        found.append(Lines(value.__qualname__, first or 1, "".join(rows)))
    return tuple(found)


def show(values: Iterable[Any], lines: Iterable[Lines]) -> None:
    """Let tracebacks of these functions, and of methods of these classes, show the lines."""
    known = {each.name: each for each in lines}
    for value in values:
        found = known.get(getattr(value, "__qualname__", ""))
        if found is not None:
            for each in vars(value).values() if inspect.isclass(value) else [value]:
                if inspect.isfunction(each):
                    each.__code__ = _in_file(each.__code__, _file(found))


@functools.lru_cache(maxsize=256)
def _file(lines: Lines) -> str:
    """Name of a file that only linecache knows."""
    name = f"<{lines.name} {hash(lines) & 0xFFFFFF:06x}>"
    rows = [*["\n"] * (lines.first - 1), *lines.text.splitlines(keepends=True)]
    linecache.cache[name] = (len(lines.text), None, rows, name)
    return name


def _in_file(code: CodeType, file: str) -> CodeType:
    """The code under another file name, if it came by value."""
    if code.co_filename != "<dynamic-code>":
        return code
    inside = (_in_file(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(inside))
