"""Executors: where a schedule's calls run. ``Threads`` for real runs, ``Inline`` for replay."""

import concurrent.futures as futures
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from rlkit.types import Handle


class Threads:
    """Each call in a thread of this process, which waits there for worker processes.

    With worker groups on Ray the work itself is in their processes: generation and training run
    side by side.
    """

    def __init__(self, num_threads: int = 4) -> None:
        self._pool = futures.ThreadPoolExecutor(num_threads, thread_name_prefix="rlkit-schedule")

    def submit(self, call: Callable[..., Any], *args: Any) -> Handle:
        """Start ``call(*args)``."""
        try:
            return self._pool.submit(call, *args)
        except RuntimeError:
            raise RuntimeError(
                "Threads: got a call after the end of the loop that used them; need new ones for "
                "each loop: executor=rk.schedule.Threads()."
            ) from None

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run it here, beside what was submitted."""
        return call(*args)

    def wait(self, handles: Sequence[Handle], *, timeout_s: float) -> list[Handle]:
        """Wait until one of them is done; those that are, none after ``timeout_s``."""
        running = cast("Sequence[futures.Future[Any]]", handles)
        done, _ = futures.wait(running, timeout_s, return_when=futures.FIRST_COMPLETED)
        return [handle for handle in handles if handle in done]

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Inline:
    """Calls run in the caller's thread, one after another, when something waits: always alike.

    What was submitted before a ``run`` runs before it, as if it had been quick enough.
    """

    def __init__(self) -> None:
        self._queue: deque[_Call] = deque()
        self._lock = threading.RLock()
        self._num_done = 0

    def submit(self, call: Callable[..., Any], *args: Any) -> Handle:
        """Queue ``call(*args)``."""
        handle = _Call(self, call, args)
        self._queue.append(handle)
        return handle

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run it after what is queued."""
        return self.submit(call, *args).result()

    def wait(self, handles: Sequence[Handle], *, timeout_s: float) -> list[Handle]:
        """Run what is queued, in order, until one of them is done."""
        with self._lock:
            while self._queue and not any(handle.done() for handle in handles):
                self._queue.popleft().run()
                self._num_done += 1
        return [handle for handle in handles if handle.done()]

    def now(self) -> float:
        """The number of calls that have run."""
        return float(self._num_done)

    def close(self) -> None:
        """Forget what is queued."""
        self._queue.clear()


class _Call:
    """A queued call."""

    def __init__(self, executor: Inline, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._executor, self._call, self._args = executor, call, args
        self._outcome: tuple[Any, BaseException | None] | None = None

    def run(self) -> None:
        try:
            self._outcome = self._call(*self._args), None
        except Exception as error:
            self._outcome = None, error

    def done(self) -> bool:
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> Any:
        self._executor.wait([self], timeout_s=0.0)
        assert self._outcome is not None, "its executor was closed"
        value, error = self._outcome
        if error is not None:
            raise error
        return value
