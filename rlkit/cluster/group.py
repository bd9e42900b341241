"""WorkerGroup: the worker's own method names, run on all its ranks."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from rlkit import trace
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.checks import did_you_mean
from rlkit.cluster.calls import first_batch, outgoing, public_methods
from rlkit.cluster.futures import Answers, Future
from rlkit.html import table
from rlkit.types import RowStore
from rlkit.workers.stages import stage_of

_calls = itertools.count()


class Transport(Answers, Protocol):
    """How calls reach the ranks of a group, and how they are made and ended."""

    def build(self) -> None:
        """Make the workers."""
        ...

    def respawn(self) -> None:
        """Make the workers again, from the class as it is now."""
        ...

    def kill(self) -> None:
        """End the workers."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Facts of each worker, known since it started."""
        ...

    def check_open(self, method: str) -> None:
        """RuntimeError if the cluster was shut down."""
        ...

    def start(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Any:
        """Begin the call on all ranks; returns a ticket."""
        ...

    def stream(self, ticket: Any, /) -> Iterator[Any]:
        """What the ranks of a started call yield, as it comes."""
        ...

    @property
    def processes(self) -> tuple[Any, ...]:
        """Identity of the processes."""
        ...

    @property
    def lost(self) -> str:
        """Why no call can succeed before a respawn; empty while all is well."""
        ...

    @property
    def owner(self) -> "WorkerGroup | None":
        """The group whose devices the workers share; None: they have their own."""
        ...


class WorkerGroup:
    """``n`` workers of one class behind the class's own methods.

    A call runs on every rank; workers take their share of a batch by rank. Results come back
    joined: rows in order, metrics reduced. Methods that make a column return it at once, still
    being computed. A method that yields gives an iterator of what any rank yields, as it comes: it
    runs from the call on. ``group.submit.method(...)`` returns a future.
    """

    def __init__(
        self, cls: type, name: str, n: int, *, transport: Transport, store: RowStore | None
    ) -> None:
        self.cls, self.name, self.n = cls, name, n
        self.methods = public_methods(cls)
        self._transport, self._store = transport, store

    def __setattr__(self, name: str, value: Any) -> None:
        if "methods" in self.__dict__ and not name.startswith("_"):
            raise AttributeError(
                f"{self.name}.{name} = ...: a group has no attributes to set, its workers are "
                "other processes. Pass it to spawn, or give the worker class a method for it."
            )
        super().__setattr__(name, value)

    @property
    def store(self) -> RowStore | None:
        """Where its workers read and write rows; None for a worker of this process."""
        return self._store

    @property
    def in_process(self) -> bool:
        """Whether the worker is an object of this process."""
        return self._store is None

    @property
    def processes(self) -> tuple[Any, ...]:
        """Identity of the group's processes: differs after a respawn."""
        return self._transport.processes

    def shares_devices(self, other: "WorkerGroup") -> bool:
        """Whether the two groups' workers lie on the same devices."""
        if self.in_process:
            return True
        mine, theirs = (group._transport.owner or group for group in (self, other))
        return mine is theirs

    @property
    def lost(self) -> str:
        """Which worker died, if one is known to have; then calls fail until a respawn."""
        return self._transport.lost

    @property
    def submit(self) -> "_Submit":
        """``group.submit.generate(prompts, n=8)`` starts the call and returns a Future."""
        return _Submit(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        methods = self.__dict__.get("methods", {})
        if name in methods:
            return _documented(methods[name], lambda *a, **k: self._call(name, a, k))
        if isinstance(getattr(self.__dict__.get("cls"), name, None), property):
            self._transport.check_open(name)
            values = self._start("__getattribute__", (name,), {}).result()
            ranks = values if self.n > 1 else [values]
            return ranks[0] if all(value == ranks[0] for value in ranks) else ranks
        raise AttributeError(
            f"{self.__dict__.get('name')}: got {name!r}, need one of {sorted(methods)}."
            f"{did_you_mean(name, methods)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inspect.isgeneratorfunction(self.methods[name]):
            return self._transport.stream(self._begin(name, args, kwargs)[0])
        future = self._start(name, args, kwargs)
        column = getattr(self.methods[name], "__rlkit_column__", None)
        batch = first_batch(args, kwargs)
        if column is None or batch is None or self._store is None:
            return future.result()
        return Column(column, self._store, batch.uids, lambda: future.result().parts)

    def _start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future:
        return Future(self._transport, *self._begin(name, args, kwargs), f"{self.name}.{name}")

    def _begin(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Batch | None]:
        """Start a call: its ticket, and the batch it is about."""
        self._transport.check_open(name)
        method = self.methods.get(name)
        prepare = getattr(method, "__rlkit_prepare__", None)
        if prepare is not None:
            kwargs = kwargs | prepare(*args, **kwargs)
        batch = first_batch(args, kwargs)
        args = tuple(outgoing(value, self._store) for value in args)
        kwargs = {key: outgoing(value, self._store) for key, value in kwargs.items()}
        stage = trace.label(stage_of(method, name))
        return self._transport.start(name, args, kwargs, stage, next(_calls)), batch

    def _describe(self) -> list[dict[str, Any]]:
        return self._transport.describe()

    def frame(self) -> Any:
        """DataFrame, a row a worker: name, rank, device, node, process id."""
        import pandas as pd

        return pd.DataFrame(self._describe())

    def __len__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"WorkerGroup({self.name!r}, {self.n} x {self.cls.__name__})"

    def _repr_html_(self) -> str:
        return table(f"WorkerGroup {self.name}: {self.n} x {self.cls.__name__}", self._describe())


class _Submit:
    """Calls that return futures."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., Future]:
        if name not in self._group.methods:
            raise AttributeError(
                f"{self._group.name}: got {name!r}, need one of {sorted(self._group.methods)}."
                f"{did_you_mean(name, self._group.methods)}"
            )
        method = self._group.methods[name]
        if inspect.isgeneratorfunction(method):
            raise AttributeError(
                f"{self._group.name}.submit.{name}: got a method that yields, need none of those "
                f"here. {self._group.name}.{name}(...) starts it, too, and returns an iterator."
            )
        return _documented(method, lambda *a, **k: self._group._start(name, a, k))

    def __dir__(self) -> list[str]:
        return sorted(self._group.methods)


def _documented(method: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with the method's name, documentation and signature, without its self."""
    call = functools.wraps(method)(call)
    signature = inspect.signature(method)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call
