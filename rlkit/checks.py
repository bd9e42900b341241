"""What errors of wrong calls share: names that are close, counts that are whole, finite numbers."""

import difflib
import inspect
import math
import operator
from collections.abc import Iterable
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

T = TypeVar("T")


class PeerError(RuntimeError):
    """What failed because another rank died, stopped, timed out or raised an error of its own."""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``" Did you mean 'rewards'?"`` if one of the known names is close, else nothing."""
    close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""


def need(ok: bool, message: str) -> None:
    """ValueError with the message unless ``ok``."""
    if not ok:
        raise ValueError(message)


def whole(name: str, value: Any, *, least: int = 1, what: str = "") -> int:
    """``value`` as an int: TypeError if it is none (or a bool), ValueError below ``least``.

    ``what`` is counted: rows, tokens.
    """
    need = f"need at least {least}{what and ' ' + what}, a whole number."
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: got {value!r}, {need}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}: got {number}, {need}")
    return number


def instance(name: str, value: Any, kind: type[T], *, such_as: str = "") -> T:
    """``value``; TypeError if it is no ``kind``."""
    if not isinstance(value, kind):
        shown = repr(value)
        got = shown if len(shown) <= 60 else type(value).__name__
        raise TypeError(f"{name}: got {got}, need {such_as or f'a {kind.__name__}'}.")
    return value


def fits(name: str, fn: Any, *args: Any, **options: Any) -> None:
    """TypeError if ``fn`` is no function, or can't be called with arguments like these."""
    need = ", ".join([*map(str, args), *options])
    if not callable(fn):
        raise TypeError(f"{name}: got {fn!r}, need a function of ({need}).")
    try:
        inspect.signature(fn).bind(*args, **options)
    except TypeError as error:
        raise TypeError(
            f"{name}: got {getattr(fn, '__name__', fn)!s}{inspect.signature(fn)}, need a function "
            f"of ({need}): {error}. functools.partial binds what is more."
        ) from None
    except ValueError:  # built-in functions have no signature
        pass


def finite(
    name: str, value: Any, *, least: float = 0.0, most: float = math.inf, above: bool = False
) -> float:
    """``value`` as a float: TypeError if it is no number, ValueError if it is not finite or out of
    range.

    ``above``: ``least`` itself is out of range.
    """
    upper = f" and at most {most:g}" if math.isfinite(most) else ""
    need = f"need a finite number {'above' if above else 'of at least'} {least:g}{upper}."
    if not isinstance(value, Real):
        raise TypeError(f"{name}: got {value!r}, {need}")
    number = float(value)
    if not (math.isfinite(number) and least <= number <= most) or (above and number == least):
        raise ValueError(f"{name}: got {value}, {need}")
    return number


def switches(who: str, options: Any, kind: Any) -> Any:
    """``options``, a dataclass of switches, or its defaults for None; else TypeError."""
    options = kind() if options is None else options
    if not isinstance(options, kind) or not all(
        isinstance(getattr(options, field.name), bool) for field in fields(options)
    ):
        raise TypeError(
            f"{who}: got options {options!r}, need rk.{kind.__name__}(...) of True and False."
        )
    return options
