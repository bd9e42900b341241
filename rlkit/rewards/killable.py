"""Reward functions that may hang: each runs in a process of its own, which can be ended."""

import contextlib
import logging
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlkit.functions import ship, unwrapped
from rlkit.rewards.combine import Combined
from rlkit.rewards.verdict import Verdict

logger = logging.getLogger("rlkit.rewards")

START_S = 120.0  # to start Python and load the function; on a loaded machine sympy takes seconds
MOST = 1e6  # of seconds, GiB and MiB: what poll(2) and setrlimit(2) can hold
MAX_IDLE = 8  # processes that wait for the next call; the oldest is ended first


class Killable:
    """``fn(prompt, response, answer) -> float`` in a process of its own, from any thread.

    A call over ``timeout_s`` is ended and gives ``Verdict(nan, "timeout")``. One that needs more
    than ``memory_gib`` or brings its process down gives ``Verdict(nan, "error")``. What ``fn``
    raises is raised here. A process is kept for the next call; ``warm_up`` is a row that a new one
    judges first, outside ``timeout_s``. An end to accidents, not a security boundary: ``fn`` runs
    as the same user.
    """

    def __init__(
        self,
        fn: Callable[[str, str, str], float],
        *,
        timeout_s: float = 2.0,
        memory_gib: float = 8.0,
        warm_up: tuple[str, str, str] | None = None,
    ) -> None:
        if not callable(fn):
            raise TypeError(
                f"Killable: got {fn!r}, need a function of prompt, response and answer."
            )
        if isinstance(unwrapped(fn), Combined):
            raise TypeError(
                f"Killable: got {fn!r}, whose parts would be lost, need a function for each part: "
                "combine({name: (Killable(fn), weight)})."
            )
        if not (0 < timeout_s <= MOST and 0 < memory_gib <= MOST):
            raise ValueError(
                f"Killable: got timeout_s={timeout_s}, memory_gib={memory_gib}; need both above 0 "
                f"and at most {MOST:g}."
            )
        self.timeout_s, self.memory_gib, self.warm_up = timeout_s, memory_gib, warm_up
        shipped = ship(fn)
        self.name, self._payload = shipped.source.name, shipped.payload

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """The reward of one response, or a NaN that says why there is none."""
        process = _take(self._key) or self._start()
        what: str = "was interrupted"
        try:
            what, value = process.ask(((prompt, response, answer), self.timeout_s), self.timeout_s)
        finally:  # after an interrupt, too: its answer would be taken for the next call's
            if what in ("ok", "raised"):
                _keep(self._key, process)
            else:
                process.end(died=what == "died")
        if what == "ok":
            return value
        if what == "raised":
            raise _raised(self.name, value)
        if what != "timeout":
            logger.warning("%s: its process %s (exit %s)", self.name, what, process.exit_code)
        return Verdict(math.nan, "timeout" if what == "timeout" else "error")

    @property
    def _key(self) -> "_Key":
        # A forked copy of this process has the sockets, too, but must not use them.
        return os.getpid(), self._payload, self.memory_gib

    def _start(self) -> "_Process":
        process = _Process()
        try:
            what, value = process.ask((self._payload, self.memory_gib), START_S)
            if what == "ok" and self.warm_up is not None:
                what, value = process.ask((self.warm_up, START_S), START_S)
        except BaseException:
            process.end()
            raise
        if what == "ok":
            return process
        process.end(died=what == "died")
        if what == "raised":
            raise _raised(self.name, value)
        raise RuntimeError(
            f"{self.name}: its process {what} before the first call (exit {process.exit_code}), "
            f"need a start within {START_S:.0f} s and {self.memory_gib} GiB of address space. "
            "Raise memory_gib, or see what it wrote to stderr."
        )

    def __repr__(self) -> str:
        return f"Killable({self.name}, timeout_s={self.timeout_s})"


class _Process:
    """A process of ``child.py`` and the socket to it."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._asked = 0  # requests; an answer has the number of its own
        path = [os.path.abspath(place) for place in sys.path]
        command = [sys.executable, "-P", "-m", "rlkit.rewards.child", str(theirs.fileno())]
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # neither Ctrl-C nor what it starts is shared with us
        )
        theirs.close()

    def ask(self, message: Any, timeout_s: float) -> tuple[str, Any]:
        """Its answer, or (timeout, None), or (died, None)."""
        self._asked += 1
        deadline_s = time.monotonic() + timeout_s
        try:
            self._connection.send((self._asked, message))
            while self._connection.poll(max(0.0, deadline_s - time.monotonic())):
                number, what, value = self._connection.recv()
                if number == self._asked:
                    return what, value
            return "timeout", None
        except (EOFError, ConnectionError):
            return "died", None

    def end(self, *, died: bool = False) -> None:
        """Kill it with all it started in its session's group; one that died ends by itself."""
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(1.0 if died else 0.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, 9)
        self._popen.wait()

    @property
    def exit_code(self) -> int | None:
        return self._popen.returncode


_Key = tuple[int, bytes, float]
_idle: list[tuple[_Key, _Process]] = []
_lock = threading.Lock()


def _take(key: _Key) -> _Process | None:
    """An idle process that has the function loaded."""
    with _lock:
        at = next((i for i, (other, _) in enumerate(_idle) if other == key), None)
        return None if at is None else _idle.pop(at)[1]


def _keep(key: _Key, process: _Process) -> None:
    with _lock:
        _idle.append((key, process))
        oldest = _idle.pop(0)[1] if len(_idle) > MAX_IDLE else None
    if oldest is not None:
        oldest.end()


def close() -> None:
    """End the idle processes of killable reward functions; the next call starts a new one.

    They end by themselves with this process.
    """
    while True:
        with _lock:
            if not _idle:
                return
            _, process = _idle.pop()
        process.end()


def _raised(name: str, value: tuple[str, str]) -> RuntimeError:
    error = RuntimeError(f"{name}: {value[0]}")
    error.add_note(f"In its own process:\n{value[1]}")
    return error
