"""Functions that travel: by value, with their source and a hash of what they compute.

A function of a notebook or of a user's module is pickled by value, so a worker always runs the code of the cell as
it is now. Functions of installed packages travel by name.
"""

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import cloudpickle


@dataclass(frozen=True, slots=True)
class Source:
    """What a function was when it was passed: name, source text, and 12 hex digits over source and captured scalars."""

    name: str
    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function as bytes, with its source."""

    payload: bytes
    source: Source

    def load(self) -> Callable[..., Any]:
        """The function, in this process."""
        fn = cloudpickle.loads(self.payload)
        _sources[id(fn)] = (fn, self.source)
        while len(_sources) > 256:
            _sources.pop(next(iter(_sources)))
        return fn


_sources: dict[int, tuple[Any, Source]] = {}  # functions that came by value have no source file here


def ship(fn: Callable[..., Any]) -> Shipped:
    """Pickle ``fn`` by value; an error names what it captured that cannot travel."""
    source = source_of(fn)
    modules = _user_modules(fn)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return Shipped(cloudpickle.dumps(fn), source)
    except Exception as error:
        raise TypeError(
            f"{source.name}: this function can't be sent to a worker ({error}). It captures something that can't be "
            "pickled: pass plain values or tensors in, or create that object inside the function."
        ) from error
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def round_trip(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a worker would get it; local runs use this, so a loop that runs locally runs on a cluster."""
    return ship(fn).load()


def source_of(fn: Callable[..., Any], *, _seen: frozenset[int] = frozenset()) -> Source:
    """Source text and hash of a function; the hash covers the scalars it captured and its own helper functions."""
    known = _sources.get(id(fn))
    if known is not None and known[0] is fn:
        return known[1]
    inner = fn
    bound: list[str] = []
    while isinstance(inner, functools.partial):
        bound += [f"{inner.args!r}", f"{sorted(inner.keywords.items())!r}"]
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    try:
        text = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    except (OSError, TypeError):
        text = f"# no source: {name}"
    code = getattr(inner, "__code__", None)
    parts = [text, *bound, *_captured(inner, _seen | {id(inner)})]
    if code is not None:
        for each in _codes(code):
            parts += [each.co_code.hex(), repr([c for c in each.co_consts if isinstance(c, _SCALARS)])]
    return Source(name, text, hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12])


_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def _captured(fn: Any, seen: frozenset[int]) -> list[str]:
    """Scalars a function closes over or reads from its module, and hashes of the user's functions among them."""
    code = getattr(fn, "__code__", None)
    found = dict(getattr(fn, "__dict__", {}))
    if code is None:
        return _facts(found, seen)
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=False):
        found[name] = cell.cell_contents
    for name in {name for each in _codes(code) for name in each.co_names}:
        if name in fn.__globals__:
            found[name] = fn.__globals__[name]
    found |= {f"default {i}": v for i, v in enumerate(fn.__defaults__ or ())}
    found |= fn.__kwdefaults__ or {}
    return _facts(found, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the lambdas, comprehensions and functions inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _facts(found: dict[str, Any], seen: frozenset[int]) -> list[str]:
    facts = []
    for name, value in sorted(found.items()):
        if isinstance(value, _SCALARS):
            facts.append(f"{name}={value!r}")
        elif inspect.isfunction(value) and id(value) not in seen and _is_users(value):
            facts.append(f"{name}={source_of(value, _seen=seen).hash}")
    return facts


def _is_users(fn: Any) -> bool:
    """Whether a function is the user's own code: neither rlkit's nor an installed package's."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return True
    if module.__name__.split(".")[0] == "rlkit":
        return False
    path = getattr(module, "__file__", None)
    installed = tuple(sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib", "platstdlib"))
    return path is not None and not path.startswith(installed)


def _user_modules(fn: Any) -> list[Any]:
    """The user's module that ``fn`` lives in, to be pickled by value; none for a notebook's function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or not _is_users(fn):
        return []
    return [] if module.__name__ in cloudpickle.list_registry_pickle_by_value() else [module]
