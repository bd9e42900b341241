"""Virtual: a schedule's calls on a virtual clock, for simulated runs."""

import concurrent.futures as futures
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.types import Handle

Future = futures.Future[Any]


class Virtual:
    """Calls beside each other in virtual time, in the caller's thread: always alike.

    A call that takes time returns a future, such as ``after(seconds)``, and has ended when ``end``
    has been called with it. Time passes while the schedule waits, from one event planned with
    ``at`` to the next; what was submitted never waits itself. ``sleep`` is for calls that are made
    again and again until something has happened.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0
        self._queue: deque[_Call] = deque()
        self._asleep: list[_Call] = []
        self._sleeps = self._ended = False

    # ---- the executor ----

    def submit(self, call: Callable[..., Any], *args: Any) -> Handle:
        """Start ``call(*args)`` when something waits; at the next ``wake`` if the caller sleeps."""
        handle = _Call(self, call, args)
        (self._asleep if self._sleeps else self._queue).append(handle)
        return handle

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run it after what was submitted has started, and beside it, until it has ended."""
        return self.submit(call, *args).result()

    def wait(self, handles: Sequence[Handle], *, timeout_s: float = 0.0) -> list[Handle]:
        """Let time pass until one of them is done; none if nothing is planned any more."""
        while not (done := [handle for handle in handles if handle.done()]):
            if self._queue:
                self._queue.popleft().run()
                self._sleeps = False
            elif self._events:
                self._pass_time()
            else:
                break
        return done

    def _pass_time(self) -> None:
        """Until a call has ended or may start, or nothing is planned any more."""
        self._ended = False
        events, queue = self._events, self._queue
        while events and not queue and not self._ended:
            self.now_s, _, call, args = heapq.heappop(events)
            call(*args)

    def now(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def close(self) -> None:
        """Forget what is queued and planned."""
        self._queue.clear()
        self._asleep.clear()
        self._events.clear()

    # ---- how calls take time ----

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Plan an event; of two at one time the first planned comes first."""
        self._num_planned += 1
        heapq.heappush(self._events, (time_s, self._num_planned, call, args))

    def after(self, seconds: float, value: Any = None) -> Future:
        """A future that is set then."""
        future = Future()
        self.at(self.now_s + seconds, self.end, future, value)
        return future

    def end(self, future: Future, value: Any = None) -> None:
        """Set it: the call that returned it ends now."""
        future.set_result(value)
        self._ended = True
        self.wake()

    def sleep(self) -> None:
        """The running call has nothing to do: what it submits from here on starts when woken."""
        self._sleeps = True

    def wake(self) -> None:
        """Something has happened: start what sleeps."""
        self._queue.extend(self._asleep)
        self._asleep.clear()


class _Call:
    """A call, which ends when it returns, or when the future does that it returns."""

    def __init__(self, runs: Virtual, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._runs, self._call, self._args = runs, call, args
        self._outcome: Future | None = None

    def run(self) -> None:
        outcome = Future()
        try:
            found = self._call(*self._args)
            if isinstance(found, futures.Future):
                outcome = found
            else:
                outcome.set_result(found)
        except Exception as error:
            outcome.set_exception(error)
        self._outcome = outcome

    def done(self) -> bool:
        return self._outcome is not None and self._outcome.done()

    def result(self, timeout: float | None = None) -> Any:
        self._runs.wait([self])
        assert self._outcome is not None, "its executor was closed"
        assert self._outcome.done(), "nothing is planned that would end it"
        return self._outcome.result()
