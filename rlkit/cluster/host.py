"""The Ray actor that hosts one worker.

Builds it from a class sent by value, runs its methods, reports spans. Calls run one after another;
``interrupt`` and ``rejoin`` come in beside them.
"""

import inspect
import os
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import cloudpickle

from rlkit import device as devices
from rlkit import trace
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.cluster.calls import (
    Failure,
    Interrupted,
    detached,
    first_batch,
    incoming,
    mark_sent,
)
from rlkit.cluster.local import accepts_context, rows_and_tokens
from rlkit.cluster.streams import Outbox
from rlkit.shield import shield
from rlkit.workers.context import Rendezvous, WorkerContext, open_meeting

CONTROL = "control"
"""Ray concurrency group of the methods that run beside a call."""


class WorkerHost:
    """One worker process."""

    def __init__(
        self, name: str, *, threads: int, paths: Sequence[str] = (), hides: str | None = None
    ) -> None:
        """``paths``: where the driver finds modules, searched here after this process's own.

        ``hides`` names a kind of device that this process must not see, for it owns none.
        """
        import torch

        sys.path += [path for path in paths if path not in sys.path]
        if hides is not None:
            devices.restrict(hides, [])
        torch.set_num_threads(threads)
        self.name = name
        self.worker: Any = None
        self.context = WorkerContext()
        self._meter, self._node = trace.Meter(None), "local"
        self._store: Any = None
        self._busy: tuple[int, int] | None = None  # thread and number of the call that runs
        self._cancelled: dict[int, str] = {}
        self._epoch = 0
        self._outbox = Outbox()
        self._lock = threading.Lock()

    def meet(self, timeout_s: float) -> tuple[str, int]:
        """Open the meeting point of this worker's group, as its rank 0: (host, port)."""
        import ray

        host = ray.util.get_node_ip_address()
        self._store = open_meeting(host, timeout_s=timeout_s)
        return host, self._store.port

    def build(self, payload: Any, context: WorkerContext, meeting: Rendezvous | None) -> Any:
        """Make the worker of payload (class, args, kwargs); ``meeting`` is where its peers are."""
        import ray

        cls, args, kwargs = payload
        try:
            worker_class = cls.load()
            if meeting is not None:
                context = replace(context, collective=self._join(context, meeting))
            args, kwargs = incoming(args, kwargs, self.name)
            if accepts_context(worker_class):
                kwargs["context"] = context
            self.context = context
            self.worker = worker_class(*args, **kwargs)
        except Exception as error:
            return Failure.of(error, self.name)
        node = ray.get_runtime_context().get_node_id()
        self._meter, self._node = trace.Meter(self.worker), node[:8]
        ids = ray.get_runtime_context().get_accelerator_ids()
        return {"node": node[:8], "node_id": node, "pid": os.getpid(), "accelerators": ids}

    def _join(self, context: WorkerContext, meeting: Rendezvous) -> Any:
        store = self._store if context.rank == 0 else None
        return meeting.join(
            context.rank, device=context.device, timeout_s=context.timeout_s, store=store
        )

    def rejoin(self, meeting: Rendezvous) -> Any:
        """After a failed call: a new process group in place of the old one, and equal state."""
        try:
            old, new = self.context.collective, self._join(self.context, meeting)
            old.group = new.group
            resync = getattr(self.worker, "resync", None)
            if resync is not None:
                resync()
        except Exception as error:
            return Failure.of(error, self.name)
        return None

    def call(self, method: str, payload: Any, stage: str, number: int, epoch: int) -> Any:
        """Run a method with payload (args, kwargs): (result as bytes, span), or a Failure.

        A call that was cancelled, or of an epoch before the last failure, is not run.
        """
        try:
            with self._lock:
                stopped = self._cancelled.pop(number, None)
                if epoch < self._epoch:
                    stopped = stopped or "a call before it failed"
                if stopped is None:
                    self._busy = threading.get_ident(), number
                    shield.reset(threading.get_ident())
            if stopped is not None:
                error = Interrupted(f"{method}: not run ({stopped})")
                return Failure(error, "", self.name, skipped=True)
            try:
                return self._call(method, payload, stage, number)
            except Exception as error:
                return self._failed(error, epoch)
            finally:
                with self._lock:
                    self._busy = None
        except KeyboardInterrupt as error:
            return self._failed(Interrupted(f"{method}: interrupted ({error})"), epoch)
        finally:
            if inspect.isgeneratorfunction(getattr(self.worker, method, None)):
                self._outbox.end(number)

    def _failed(self, error: BaseException, epoch: int) -> Failure:
        """A rank that has peers runs nothing more of this epoch: they may not have failed."""
        if self.context.layout.num_devices > 1:
            self.advance(epoch + 1)
        return Failure.of(error, self.name)

    def _call(self, method: str, payload: Any, stage: str, call: int) -> tuple[bytes, Any]:
        args, kwargs = payload
        with trace.stage_span(
            stage, self._meter, worker=self.name, node=self._node, call=call
        ) as span:
            args, kwargs = incoming(args, kwargs, self.name)
            result = getattr(self.worker, method)(*args, **kwargs)
            if inspect.isgenerator(result):
                result = self._hand_on(result, call, span)
            else:
                given = first_batch(args, kwargs)
                if given is not None:
                    given = given.shard(self.context.dp_rank, self.context.dp_size)
                span.rows, span.tokens = rows_and_tokens(given, result)
        return _packed(result), trace.current().drain()

    def _hand_on(self, items: Generator[Any, Any, Any], call: int, span: trace.OpenSpan) -> None:
        """Put what a generator yields where the driver takes it, at once."""
        with closing(items):
            for item in items:
                rows, tokens = rows_and_tokens(None, item)
                span.rows, span.tokens = span.rows + rows, span.tokens + tokens
                self._outbox.put(call, _packed(item))

    def take(self, number: int, wait_s: float) -> tuple[list[bytes], bool]:
        """What call ``number`` has yielded, and whether that was all; waits for the first item."""
        return self._outbox.take(number, wait_s)

    def cancel(self, number: int, reason: str) -> str:
        """Stop call ``number``: ``running`` if it runs, ``queued`` if it is yet to come.

        A running one gets a KeyboardInterrupt, after an optimizer step that it is in.
        """
        error = type("Interrupted", (KeyboardInterrupt,), {"__str__": lambda self: reason})
        with self._lock:
            if self._busy is None or self._busy[1] != number:
                self._cancelled[number] = reason
                return "queued"
            shield.interrupt(self._busy[0], error)
            return "running"

    def advance(self, epoch: int) -> None:
        """Run no call of an earlier epoch any more."""
        with self._lock:
            self._epoch = max(self._epoch, epoch)


def _packed(result: Any) -> bytes:
    """A result as it travels; its rows are the driver's from here on."""
    travels = cloudpickle.dumps(detached(result))
    mark_sent(result)
    return travels


class Runner:
    """Runs functions of the user beside the data: rewards, ``batch.apply``."""

    def run(self, call: Any, batch: Batch, name: str) -> Column:
        """``call(batch) -> rows``, kept in the store: a column."""
        part = batch.store.put(name, batch.uids, call(batch))
        return Column(name, batch.store, batch.uids, [part])
