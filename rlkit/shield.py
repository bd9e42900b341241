"""Steps that must be whole: an interrupt that comes inside is raised at their end.

``with shield:`` around an optimizer step or the publication of weights. It holds back Ctrl-C on the
main thread and the interrupts that a cluster sends to a worker's thread.
"""

import ctypes
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class Shield:
    """Defers interrupts of the thread that is inside it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run while it is held
        self._inside: dict[int, int] = {}  # thread -> depth
        self._pending: dict[int, BaseException] = {}
        self._handler: Any = None

    def __enter__(self) -> "Shield":
        thread = threading.get_ident()
        with self._lock:
            depth = self._inside[thread] = self._inside.get(thread, 0) + 1
        if depth == 1 and threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGINT, self._on_signal)
            if before != self._on_signal:  # else a finalizer came while the shield was left
                self._handler = before
        return self

    def __exit__(self, *exc: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            depth = self._inside[thread] = self._inside[thread] - 1
            pending = None if depth else self._pending.pop(thread, None)
        if depth == 0 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handler)
        if pending is not None:
            raise pending

    @property
    def pending(self) -> bool:
        """Whether an interrupt waits for this thread to leave."""
        return threading.get_ident() in self._pending

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._pending[threading.get_ident()] = KeyboardInterrupt()

    def interrupt(self, thread: int, error: type[BaseException]) -> None:
        """Raise ``error`` in a thread: now, or when it leaves the shield.

        Python code stops at its next instruction, a call into C when it returns.
        """
        with self._lock:
            if self._inside.get(thread, 0):
                self._pending[thread] = error()
                return
            target = ctypes.c_ulong(thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(error))

    def reset(self, thread: int) -> None:
        """Forget what an earlier, interrupted use of the thread may have left."""
        with self._lock:
            self._inside.pop(thread, None)
            self._pending.pop(thread, None)


shield = Shield()
"""The shield of this process."""

SOON_S = 0.05
"""How long after a finalizer the interrupt that came inside is raised."""


def when_collected(owner: object, call: Callable[..., Any], *args: Any) -> None:
    """``call(*args)`` when ``owner`` is collected, but not when the process ends.

    Python drops what a finalizer raises: a Ctrl-C that comes inside is raised soon after it.
    """
    weakref.finalize(owner, _whole, call, *args).atexit = False


def _whole(call: Callable[..., Any], *args: Any) -> None:
    try:
        with shield:
            call(*args)
    except KeyboardInterrupt:
        main = threading.main_thread().ident
        again = threading.Timer(SOON_S, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()
