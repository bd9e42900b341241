"""What happens to the arguments and results of a group call, the same locally and on Ray."""

import copy
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from rlkit import device as devices
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.checks import whole
from rlkit.config import Layout
from rlkit.dock import TransferDock
from rlkit.functions import Shipped, ship
from rlkit.metrics import StepMetrics
from rlkit.types import RowStore
from rlkit.workers.context import PeerError


def outgoing(value: Any, store: RowStore | None) -> Any:
    """An argument as it travels: batches and columns in the cluster's store, functions by value."""
    if isinstance(value, Batch):
        return value.on(store or value.store)
    if isinstance(value, Column):
        return value if store is None else value.on(store)
    if callable(value) and not isinstance(value, type):
        return ship(value)
    return value


def incoming(args: Any, kwargs: Any, worker: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments as the worker sees them; of a dock it is a holder."""

    def arrived(value: Any) -> Any:
        if isinstance(value, TransferDock):
            return value.arrived(worker)
        return value.load() if isinstance(value, Shipped) else value

    return [*map(arrived, args)], {key: arrived(value) for key, value in kwargs.items()}


def first_batch(args: Sequence[Any], kwargs: dict[str, Any]) -> Batch | None:
    """The batch that a call is about."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Batch)), None)


def merge(results: Sequence[Any], batch: Batch | None) -> Any:
    """One result a rank -> the result of the call.

    Rows joined in rank order, metrics reduced, else a list.
    """
    present = [result for result in results if result is not None]
    if present and isinstance(present[0], Batch):
        return Batch.concat(present)
    first = results[0]
    if isinstance(first, Column):
        uids = first.uids if batch is None else batch.uids
        parts = [part for column in results for part in column.parts]
        return Column(first.name, first.store, uids, parts, expands=first.expands)
    if isinstance(first, StepMetrics):
        return StepMetrics.merge(results)
    if all(result is None for result in results):
        return None
    if isinstance(first, Path):  # written once, by the first rank
        return first
    return first if len(results) == 1 else list(results)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker, with the traceback it had there."""

    error: BaseException
    traceback: str
    worker: str
    skipped: bool = False
    """Whether the call was cancelled before it began."""

    @classmethod
    def of(cls, error: BaseException, worker: str) -> "Failure":
        """Wrap the exception being handled.

        One that can't travel goes as a RuntimeError of its text.
        """
        text = traceback.format_exc()
        try:
            cloudpickle.loads(cloudpickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, text, worker)

    @property
    def of_peer(self) -> bool:
        """Whether the rank only suffered from another's failure."""
        return isinstance(self.error, PeerError | Interrupted)

    def raised(self) -> BaseException:
        """The error, with the worker's name and traceback as a note."""
        self.error.add_note(f"on worker {self.worker}:\n{self.traceback}")
        return self.error


class Interrupted(RuntimeError):
    """A call that was stopped from outside."""


class Call:
    """One call on all ranks."""

    def __init__(self, number: int, what: str, refs: Sequence[Any], held: Any) -> None:
        self.number, self.what, self.refs, self.held = number, what, list(refs), held
        self.start_s = time.time()
        self.answers: dict[int, Any] = {}
        self.error: BaseException | None = None
        self.collected = self.abandoned = False

    @property
    def builds(self) -> bool:
        """Whether it is the start of the workers, before any call of theirs."""
        return self.number < 0

    @property
    def waiting(self) -> dict[Any, int]:
        """Refs without an answer, with their ranks."""
        return {ref: rank for rank, ref in enumerate(self.refs) if rank not in self.answers}

    @property
    def ended(self) -> bool:
        """Whether it has a result or an error."""
        return self.collected or self.error is not None or len(self.answers) == len(self.refs)

    @property
    def failed(self) -> bool:
        """Whether a rank that ran it has failed."""
        return any(is_error(a) and not _is_skipped(a) for a in self.answers.values())

    @property
    def skipped(self) -> bool:
        """Whether no rank has run it, nor will."""
        return not self.waiting and all(map(_is_skipped, self.answers.values()))


def is_error(answer: Any) -> bool:
    """Whether a rank's answer is an error."""
    return isinstance(answer, Failure | Exception)


def _is_skipped(answer: Any) -> bool:
    return isinstance(answer, Failure) and answer.skipped


def detached(result: Any) -> Any:
    """A copy of a result as it travels: tensors in host memory, and no store in it."""
    if not isinstance(result, Batch | Column):
        return devices.to_host(result)
    out: Any = copy.copy(result)
    out.store = None
    if isinstance(result, Batch):
        out.columns = {name: detached(column) for name, column in result.columns.items()}
    return out


def mark_sent(result: Any) -> None:
    """The driver owns the rows of this result now: sent again, they are no news."""
    for column in _columns(result):
        for part in column.parts:
            part.fresh = False


def attached(result: Any, store: Any) -> Any:
    """A worker's result in this process: its rows are freed when nothing here names them."""
    for column in _columns(result):
        column.store = store
        for part in column.parts:
            store.adopt(part)
    if isinstance(result, Batch):
        result.store = store
    return result


def _columns(result: Any) -> list[Any]:
    if isinstance(result, Batch):
        return list(result.columns.values())
    return [result] if isinstance(result, Column) else []


def current_class(cls: type) -> type:
    """The class as its module has it now: a cell or a reloaded module may have defined it again."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) else cls


def public_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Methods of a worker class that a group offers."""
    return {
        name: value
        for name in dir(cls)
        if not name.startswith("_")
        and callable(value := getattr(cls, name))
        and not isinstance(value, type)
    }


def num_workers(n: Any, layout: Any, beside: Any) -> int:
    """Workers to spawn: ``n``, or as many as the layout has devices, or the group beside them."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"spawn: layout: got {layout!r}, need one such as rk.Layout(tp=2).")
    if n is None and layout is not None:
        n = layout.num_devices
    elif n is None:
        n = 1 if beside is None else len(beside)
    return whole("spawn: n", n, what="worker")


def check_arguments(cls: type, args: Any, kwargs: Any) -> None:
    """TypeError for arguments that a worker class does not take, before processes start for it."""
    try:
        signature = inspect.signature(cls)
        more = {"context": None} if "context" in signature.parameters else {}
        signature.bind(*args, **more | kwargs)
    except TypeError as error:
        raise TypeError(
            f"spawn: {cls.__name__}: {error}; need {signature}. Options of a backend go to it: "
            "backend=functools.partial(rk.TorchBackend, options=...)."
        ) from None
    except ValueError:  # a class in C has no signature
        pass


def default_name(cls: type, taken: Sequence[str]) -> str:
    """Group name of a class: ``actor`` for ActorWorker; a second one is ``actor_2``."""
    base = "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).strip("_")
    base = base.removesuffix("_worker") or "worker"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name
