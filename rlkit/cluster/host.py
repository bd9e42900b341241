"""The Ray actor that hosts one worker.

Builds it from a class sent by value, runs its methods, reports spans.
"""

import os
import time
from dataclasses import replace
from typing import Any

from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.calls import Failure, incoming
from rlkit.cluster.local import accepts_context, count_tokens
from rlkit.store import Column
from rlkit.workers.context import Rendezvous, WorkerContext, open_meeting


class WorkerHost:
    """One worker process."""

    def __init__(self, name: str, *, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.name = name
        self.worker: Any = None
        self._store: Any = None

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
                joined = meeting.join(
                    context.dp_rank,
                    device=context.device,
                    timeout_s=context.timeout_s,
                    store=self._store,
                )
                context = replace(context, collective=joined)
            kwargs = {key: incoming(value) for key, value in kwargs.items()}
            if accepts_context(worker_class):
                kwargs["context"] = context
            self.context = context
            self.worker = worker_class(*map(incoming, args), **kwargs)
        except Exception as error:
            return Failure.of(error, self.name)
        node = ray.get_runtime_context().get_node_id()
        return {"node": node[:8], "node_id": node, "pid": os.getpid()}

    def call(self, method: str, payload: Any, stage: str, call: int) -> Any:
        """Run a method with payload (args, kwargs): (result, span), or a Failure."""
        import ray

        args, kwargs = payload
        start = time.time()
        try:
            args = [incoming(value) for value in args]
            kwargs = {key: incoming(value) for key, value in kwargs.items()}
            result = getattr(self.worker, method)(*args, **kwargs)
        except Exception as error:
            return Failure.of(error, self.name)
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Batch)), None)
        rows = None if given is None else given.shard(self.context.dp_rank, self.context.dp_size)
        span = trace.Span(
            stage=stage,
            start_s=start,
            end_s=time.time(),
            worker=self.name,
            node=ray.get_runtime_context().get_node_id()[:8],
            rows=len(result) if isinstance(result, Batch) else 0 if rows is None else len(rows),
            tokens=count_tokens(stage, rows, result),
            version=int(getattr(self.worker, "version", 0)),
            call=call,
        )
        return result, span


class Runner:
    """Runs functions of the user beside the data: rewards, ``batch.apply``."""

    def run(self, call: Any, batch: Batch, name: str) -> Column:
        """``call(batch) -> rows``, kept in the store: a column."""
        part = batch.store.put(name, batch.uids, call(batch))
        return Column(name, batch.store, batch.uids, [part])
