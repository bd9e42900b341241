"""Functions that travel: by value, with their source and a hash of what they compute.

A function of a notebook or of a user's module is pickled by value, so a worker always runs the code
of the cell as it is now. Functions of installed packages travel by name.
"""

import contextlib
import functools
import hashlib
import inspect
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from rlkit.source_lines import Lines, lines_of, show, source_lines


@dataclass(frozen=True, slots=True)
class Source:
    """What a function was when it was passed.

    Name, source text, and 12 hex digits over source and captured values.
    """

    name: str
    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function as bytes, with its source."""

    payload: bytes
    source: Source
    lines: tuple[Lines, ...] = ()
    """Of the function and of the user's functions it uses."""

    def load(self) -> Callable[..., Any]:
        """The function, in this process."""
        fn = cloudpickle.loads(self.payload)
        show((each for each, _ in _reached(fn)), self.lines)
        _sources[id(fn)] = (fn, self.source)
        while len(_sources) > 256:
            _sources.pop(next(iter(_sources)))
        return fn


# Functions that came by value have no source file here.
_sources: dict[int, tuple[Any, Source]] = {}
_shipping = threading.Lock()  # modules are pickled by value only while a function of theirs is


def ship(fn: Callable[..., Any]) -> Shipped:
    """Pickle ``fn`` by value; an error names what it captured that cannot travel."""
    source, lines = source_of(fn), lines_of(each for each, _ in _reached(fn))
    with _shipping:
        own, used = _user_modules(fn)
        try:
            try:
                return Shipped(_dumps(fn, own | used), source, lines)
            except Exception:  # a module may hold what can't travel: then workers import it
                return Shipped(_dumps(fn, own), source, lines)
        except Exception as error:
            raise TypeError(
                f"{source.name}: this function can't be sent to a worker ({error}). It captures "
                "something that can't be pickled: pass plain values or tensors in, or create that "
                "object inside the function."
            ) from error


def _dumps(fn: Any, modules: dict[str, ModuleType]) -> bytes:
    """Pickle ``fn`` with these modules by value."""
    names = sorted(modules.keys() - cloudpickle.list_registry_pickle_by_value())
    for name in names:
        cloudpickle.register_pickle_by_value(modules[name])
    try:
        return cloudpickle.dumps(fn)
    finally:
        for name in names:
            cloudpickle.unregister_pickle_by_value(modules[name])


def round_trip(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a worker would get it.

    Local runs use this, so a loop that runs locally runs on a cluster.
    """
    return ship(fn).load()


def source_of(fn: Callable[..., Any], *, _seen: frozenset[int] = frozenset()) -> Source:
    """Source text and hash of a function.

    The hash covers its own helper functions and what it captured of scalars, and of tuples, lists,
    dicts, sets and dataclasses of such.
    """
    known = _sources.get(id(fn))
    if known is not None and known[0] is fn:
        return known[1]
    inner = unwrapped(fn)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    try:
        named = inspect.isroutine(inner) or inspect.isclass(inner)
        text = "".join(source_lines(inner if named else type(inner))[0])
    except (OSError, TypeError):
        text = f"# no source: {name}"
    parts = [text]
    for key, value in sorted(_captured(fn).items()):
        fact = _fact(value, _seen | {id(fn), id(inner)})
        if fact is not None:
            parts.append(f"{key}={fact}")
    for code in _codes(getattr(inner, "__code__", None)):
        parts += [code.co_code.hex(), repr([c for c in code.co_consts if isinstance(c, _SCALARS)])]
    return Source(name, text, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12])


_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)


def unwrapped(fn: Any) -> Any:
    """The function inside a partial."""
    return unwrapped(fn.func) if isinstance(fn, functools.partial) else fn


def _captured(fn: Any) -> dict[str, Any]:
    """What a function has beside its code.

    Bound arguments, attributes, closure, the globals it names, defaults.
    """
    found: dict[str, Any] = {}
    if isinstance(fn, functools.partial):
        found |= {f"bound {i}": value for i, value in enumerate(fn.args)}
        found |= {f"bound {name}": value for name, value in fn.keywords.items()}
        return _captured(fn.func) | found
    found |= _attributes(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        return found
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # empty: what it names is not made yet
            found[name] = cell.cell_contents
    for name in {name for each in _codes(code) for name in each.co_names}:
        if name in fn.__globals__:
            found[name] = fn.__globals__[name]
    found |= {f"default {i}": v for i, v in enumerate(fn.__defaults__ or ())}
    return found | (fn.__kwdefaults__ or {})


def _attributes(fn: Any) -> dict[str, Any]:
    """Of a function, of the object a method is bound to, of an object that is called."""
    found = dict(getattr(fn, "__dict__", {}))
    if inspect.ismethod(fn):
        found["self"] = fn.__self__
    if is_dataclass(fn):  # with slots it has no __dict__
        found |= {item.name: getattr(fn, item.name, None) for item in fields(fn)}
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """A code object and those of the lambdas, comprehensions and functions inside it."""
    if code is not None:
        yield code
        for const in code.co_consts:
            if isinstance(const, CodeType):
                yield from _codes(const)


def _fact(value: Any, seen: frozenset[int]) -> str | None:
    """What of a captured value goes into the hash.

    Scalars, also inside containers and dataclasses; what a user's function is, which function
    another is.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _SCALARS):
        return repr(value)
    items = _items(value)
    if items is not None:
        if id(value) in seen:  # it holds itself
            return None
        inside = seen | {id(value)}
        facts = [(_fact(key, inside), _fact(item, inside)) for key, item in items]
        facts = sorted(facts, key=repr) if isinstance(value, dict | set | frozenset) else facts
        return f"{type(value).__qualname__}{facts}"
    if _travels(value) or _is_local(value):
        return None if id(value) in seen else source_of(value, _seen=seen).hash
    if inspect.isroutine(value):
        named = value if hasattr(value, "__qualname__") else type(value)  # a cached_property
        return f"{getattr(named, '__module__', '')}.{named.__qualname__}"
    return None


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """(key, item) of a container or dataclass; None for other values."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    if isinstance(value, set | frozenset):
        return ((item, None) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return [(item.name, getattr(value, item.name, None)) for item in fields(value)]
    return None


def _travels(value: Any) -> bool:
    """Whether a captured value is code of the user's, which goes with the function that captured
    it.
    """
    return isinstance(value, functools.partial) or (inspect.isfunction(value) and _is_users(value))


def _is_local(value: Any) -> bool:
    """Whether a value is a function made inside another: pickled by value wherever it is from."""
    return inspect.isfunction(value) and "<locals>" in value.__qualname__


def _is_users(fn: Any) -> bool:
    """Whether a function is the user's own code: neither rlkit's nor an installed package's."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    return module is None or _is_users_module(module)


def _is_sendable(module: Any) -> bool:
    """Whether this is a module of the user's that pickle can be told to send by value."""
    return (
        isinstance(module, ModuleType)
        and module.__name__ != "__main__"
        and sys.modules.get(module.__name__) is module
        and _is_users_module(module)
    )


def _is_users_module(module: ModuleType) -> bool:
    if module.__name__ == "__main__":
        return True
    if module.__name__.split(".")[0] == "rlkit":
        return False
    path = getattr(module, "__file__", None)
    installed = tuple(
        sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib", "platstdlib")
    )
    return path is not None and not path.startswith(installed)


def _reached(fn: Any) -> Iterator[tuple[Any, bool]]:
    """``fn`` and the user's functions and modules it uses, and whether one is part of a module."""
    todo, seen = [(fn, False)], {id(fn)}
    while todo:
        each, in_module = todo.pop()
        yield unwrapped(each), in_module
        if isinstance(each, ModuleType):
            inside, in_module = list(vars(each).values()), True
        else:
            inside = list(_captured(each).values())
        for value in inside:
            usable = _travels(value) or _is_local(value) or _is_sendable(value)
            if usable and id(value) not in seen:
                seen.add(id(value))
                todo.append((value, in_module))


def _user_modules(fn: Any) -> tuple[dict[str, ModuleType], dict[str, ModuleType]]:
    """The user's modules that ``fn`` and its functions live in, and those they use by name."""
    own, used = {}, {}
    for each, in_module in _reached(fn):
        if isinstance(each, ModuleType):
            used[each.__name__] = each
        else:
            module = sys.modules.get(getattr(each, "__module__", None) or "")
            if module is not None and _is_sendable(module):
                (used if in_module else own)[module.__name__] = module
    return own, used
