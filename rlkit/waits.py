"""Waits for collectives that an interrupt reaches."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from rlkit.shield import shield

GRACE_S = 1.0
"""How long a shielded wait goes on after an interrupt: peers that are on their way arrive."""


def finish(work: Any) -> None:
    """Wait for a collective in Python, so that an interrupt reaches the thread that waits; in a
    shield after ``GRACE_S``.
    """
    delay_s, left_s = 1e-5, GRACE_S
    while not work.is_completed():
        time.sleep(delay_s)
        if shield.pending and (left_s := left_s - delay_s) < 0:
            raise InterruptedError("interrupted while waiting for peers")  # the shield has its own
        delay_s = min(2 * delay_s, 1e-3)
    work.wait()


class Waiter:
    """Waits for sends and receives in a thread, so that an interrupt reaches the thread that asks:
    gloo's know that they are done only in ``wait``. A context manager.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[Any] = SimpleQueue()
        self._done: SimpleQueue[Exception | None] = SimpleQueue()
        threading.Thread(target=_wait_for, args=(self._todo, self._done), daemon=True).start()

    def each(self, works: Sequence[Any]) -> Iterator[None]:
        """Yields when the first is done, the second, and so on; an error of one is raised here."""
        for work in works:
            self._todo.put(work)
        for _ in works:
            while True:
                with suppress(Empty):
                    error = self._done.get(timeout=0.1)
                    break
            if error is not None:
                raise error
            yield

    def __enter__(self) -> "Waiter":
        return self

    def __exit__(self, *exc: object) -> None:
        self._todo.put(None)


def _wait_for(todo: Any, done: Any) -> None:
    while (work := todo.get()) is not None:
        try:
            work.wait()
            done.put(None)
        except Exception as error:
            done.put(error)
