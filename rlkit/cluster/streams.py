"""What a worker's generator method yields, on its way to the driver.

The call itself is one of the pipeline, with its order, failures and interrupts. What it yields
waits in the worker's ``Outbox``; the driver's ``Stream`` asks every rank for it and hands it on as
it comes, whichever rank it is of.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlkit import trace

if TYPE_CHECKING:
    from rlkit.cluster.calls import Call
    from rlkit.cluster.transport import RayTransport

STREAM = "stream"
"""Ray concurrency group in which the driver waits for what a call yields."""
ASK_S = 5.0
"""How long one question waits in the worker."""


class Outbox:
    """What calls of this worker have yielded, by number, until the driver takes it."""

    def __init__(self) -> None:
        self._items: dict[int, deque[Any]] = {}
        self._ended: set[int] = set()
        self._changed = threading.Condition()

    def put(self, number: int, item: Any) -> None:
        """Keep one item of a call."""
        with self._changed:
            self._items.setdefault(number, deque()).append(item)
            self._changed.notify_all()

    def end(self, number: int) -> None:
        """The call yields nothing more."""
        with self._changed:
            self._ended.add(number)
            self._changed.notify_all()

    def take(self, number: int, wait_s: float) -> tuple[list[Any], bool]:
        """The items there are, and whether that was all; waits up to ``wait_s`` for the first."""
        with self._changed:
            self._changed.wait_for(
                lambda: number in self._items or number in self._ended, timeout=wait_s
            )
            items, ended = list(self._items.pop(number, ())), number in self._ended
            self._ended.discard(number)
            return items, ended


class Stream:
    """Iterates over what all ranks of a call yield, as it comes.

    The call runs whether or not somebody asks; ``close``, or forgetting the stream, stops it.
    """

    def __init__(self, transport: "RayTransport", call: "Call") -> None:
        self._transport, self._call = transport, call
        self._ready: deque[Any] = deque()
        self._asked: dict[Any, int] = {}  # ref of a question -> rank
        self._over = False
        for rank in range(len(call.refs)):
            self._ask(rank)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next item of any rank; the call's error if it failed.

        TimeoutError names the ranks that have yielded nothing within the cluster's limit.
        """
        try:
            start = time.time()
            while not self._ready and self._asked:
                self._collect(1.0)
                if not self._ready and time.time() - start > self._transport.cluster.timeout_s:
                    self._transport.pipeline.give_up(self._call, time.time() - start)
            if self._ready:
                return self._transport.attached(self._ready.popleft())
            if not self._over:
                self._over = True
                self._transport.finish(self._call, None, None)
        except KeyboardInterrupt:
            self._transport.pipeline.cancel(self._call, "by the user")
            raise
        raise StopIteration

    def _ask(self, rank: int) -> None:
        self._asked[self._take(rank, ASK_S)] = rank

    def _take(self, rank: int, wait_s: float) -> Any:
        take = self._transport.hosts[rank].take.options(concurrency_group=STREAM)
        return take.remote(self._call.number, wait_s)

    def _collect(self, timeout_s: float) -> None:
        """Take answers that have come, and ask those ranks again."""
        import ray
        from ray import exceptions

        with trace.wait(self._call.what):
            answered, _ = ray.wait(list(self._asked), num_returns=1, timeout=timeout_s)
        for ref in answered:
            rank = self._asked.pop(ref)
            try:
                items, ended = ray.get(ref)
            except exceptions.RayError:  # its process died: finish names it
                continue
            self._ready.extend(items)
            if not ended and not self._transport.done(self._call):
                self._ask(rank)
            elif not ended:  # it failed or was skipped: what was yielded before counts
                self._ready.extend(self._last(rank))
        if not answered and self._transport.done(self._call):
            self._asked.clear()

    def _last(self, rank: int) -> list[Any]:
        import ray
        from ray import exceptions

        with contextlib.suppress(exceptions.RayError):
            return ray.get(self._take(rank, 0.0), timeout=ASK_S)[0]
        return []

    def close(self) -> None:
        """Stop the call; what it has yielded and nobody took is freed."""
        if self._over or not self._transport.cluster.open:
            return
        self._over = True
        self._transport.pipeline.cancel(self._call, "its stream was closed")
        deadline = time.time() + ASK_S
        while self._asked and time.time() < deadline:
            self._collect(0.2)
        for item in self._ready:
            self._transport.attached(item)
        self._ready.clear()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()

    def __repr__(self) -> str:
        state = "ended" if self._over else "running"
        return f"Stream({self._transport.name}.{self._call.what}, {state})"
