"""Two guards of a cluster: a thread that notices a lost head, a process that cleans up.

Ray ends a driver about a minute after its head process died; a notebook would lose its kernel. The
thread disconnects before that. And when the driver itself is killed, Ray's helper processes linger;
the process started here, whose stdin the driver holds open, ends them.
"""

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger("rlkit.cluster")

PERIOD_S = 2.0
MISSES = 3


def reachable(address: str, *, timeout_s: float = 2.0) -> bool:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


class HeadWatch:
    """Calls ``lost()`` once when the head at ``address`` has not answered three times in a row."""

    def __init__(self, address: str, lost: Callable[[], None]) -> None:
        self.address, self._lost = address, lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rlkit-head-watch")
        self._thread.start()

    def _run(self) -> None:
        missed = 0
        while not self._stop.wait(PERIOD_S):
            missed = 0 if reachable(self.address) else missed + 1
            if missed == MISSES:
                logger.error("the Ray head at %s is gone: cluster lost", self.address)
                self._lost()
                return

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()


class Reaper:
    """A process that outlives this one by seconds and ends what is left of a Ray session."""

    def __init__(self, session: str) -> None:
        script = Path(__file__).with_name("reaper.py")  # as a script: importing rlkit costs seconds
        command = [sys.executable, "-I", str(script), session]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it clean up now, and wait for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
