"""The cluster of one process: the same lines, no Ray. Calls run at once, in the caller's thread."""

import inspect
import os
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.base import Cluster
from rlkit.cluster.calls import (
    current_class,
    default_name,
    first_batch,
    incoming,
    merge,
    num_workers,
)
from rlkit.cluster.group import WorkerGroup
from rlkit.config import Layout
from rlkit.dock import LocalTransport
from rlkit.functions import ship
from rlkit.workers.context import WorkerContext


class LocalCluster(Cluster):
    """Workers as objects of this process; made by ``rk.launch(backend="local")``."""

    def __init__(self, *, device: str, seed: int, threads: int = 1) -> None:
        import torch

        torch.set_num_threads(threads)  # more gain small models nothing on a busy CPU
        self.device, self.seed, self.num_devices = device, seed, 1
        self.groups, self.open = {}, True

    def spawn(
        self,
        cls: type,
        *args: Any,
        n: int | None = None,
        layout: Layout | None = None,
        colocate_with: WorkerGroup | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        """One worker of ``cls(*args, **kwargs)`` in this process; several need a Ray cluster."""
        self._check_open("spawn")
        if (n := num_workers(n, layout, None)) != 1:
            raise ValueError(
                f"spawn: got {n} workers, need n=1: backend='local' has one process. "
                "Use rk.launch() for a Ray cluster."
            )
        name = name or default_name(cls, list(self.groups))
        transport = _InProcess(self, cls, args, kwargs, name)
        self.groups[name] = WorkerGroup(cls, name, 1, transport=transport, store=None)
        return self.groups[name]

    def _dock_transport(self, **options: Any) -> LocalTransport:
        return LocalTransport(**options)

    def shutdown(self) -> None:
        """Forget the workers."""
        self.groups.clear()
        self.open = False

    def __repr__(self) -> str:
        return f"LocalCluster({self.device}, {len(self.groups)} groups)"


class _InProcess:
    """Calls to one object of this process."""

    lost = ""

    def __init__(self, cluster: LocalCluster, cls: type, args: Any, kwargs: Any, name: str) -> None:
        self.cluster, self.cls, self.args, self.kwargs, self.name = cluster, cls, args, kwargs, name
        self._lock = threading.RLock()  # a worker does one call at a time, whoever calls
        self.build()

    def respawn(self) -> None:
        self.cls = current_class(self.cls)
        self.build()

    def build(self) -> None:
        kwargs = dict(self.kwargs)
        if accepts_context(self.cls):
            kwargs["context"] = WorkerContext(
                name=self.name, device=self.cluster.device, seed=self.cluster.seed
            )
        self.worker = ship(self.cls).load()(*self.args, **kwargs)
        self._meter = trace.Meter(self.worker)
        facts = {"worker": f"{self.name}/0", "class": self.cls.__name__}
        self.facts = [facts | {"device": self.cluster.device, "node": "local", "pid": os.getpid()}]

    def kill(self) -> None:
        self.worker = None

    def check_open(self, method: str) -> None:
        self.cluster._check_open(f"{self.name}.{method}")

    def start(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Any:
        with self._lock:
            return self._call(method, args, kwargs, stage, call)

    def _call(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Any:
        batch, me = first_batch(args, kwargs), f"{self.name}/0"
        with trace.stage_span(stage, self._meter, worker=me, call=call) as span:
            args, kwargs = incoming(args, kwargs, me)
            result = getattr(self.worker, method)(*args, **kwargs)
            span.devices = self.cluster.num_devices
            if inspect.isgenerator(result):  # its body runs piece by piece, in spans of their own
                return self._pieces(result, stage, call)
            span.rows, span.tokens = rows_and_tokens(batch, result)
        return result

    def _pieces(self, items: Generator[Any, Any, Any], stage: str, call: int) -> Iterator[Any]:
        with closing(items):
            while True:
                span = trace.stage_span(stage, self._meter, worker=f"{self.name}/0", call=call)
                with self._lock, span:
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                    span.devices = self.cluster.num_devices
                    span.rows, span.tokens = rows_and_tokens(None, item)
                yield item

    def stream(self, ticket: Any) -> Iterator[Any]:
        return ticket

    def finish(self, ticket: Any, batch: Batch | None, timeout_s: float | None) -> Any:
        return merge([ticket], batch)

    def done(self, ticket: Any) -> bool:
        return True

    def cancel(self, ticket: Any) -> None:
        """A local call has ended when it returns."""

    def abandon(self, ticket: Any) -> None:
        """Rows of a local call are freed with the result itself."""

    @property
    def processes(self) -> tuple[Any, ...]:
        return (id(self.worker),)

    @property
    def owner(self) -> None:
        return None

    def describe(self) -> list[dict[str, Any]]:
        return self.facts


def accepts_context(cls: type) -> bool:
    """Whether a worker class asks for its place in the cluster."""
    return "context" in inspect.signature(cls).parameters


def rows_and_tokens(batch: Batch | None, result: Any) -> tuple[int, int]:
    """What a call handled: the batch it made, or else the one it was given."""
    made = result if isinstance(result, Batch) else batch
    return (0, 0) if made is None else (len(made), int(made.num_tokens.sum()))
