"""What workers print, shown in the driver a few times a second whatever they print."""

import sys
import threading
from collections import deque
from typing import Any, TextIO

FLUSHES_PER_S = 4.0
MAX_LINES = 40
"""Lines shown at a time; of more, the last ones, and how many are left out."""


class LineRelay:
    """Collects lines and writes them in bounded portions; the last line always comes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._skipped = 0
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def add(self, lines: list[str]) -> None:
        """Take lines; they are written within a quarter of a second."""
        with self._lock:
            self._skipped += max(0, len(self._lines) + len(lines) - MAX_LINES)
            self._lines.extend(lines)
            if self._timer is None:
                self._timer = threading.Timer(1 / FLUSHES_PER_S, self.flush)
                self._timer.daemon = True
                self._timer.start()

    def flush(self) -> None:
        """Write what has come."""
        with self._lock:
            lines, skipped, self._timer = list(self._lines), self._skipped, None
            self._lines.clear()
            self._skipped = 0
        if skipped:
            lines.insert(0, f"... {skipped:,} lines of workers left out")
        if lines:
            stream = self._stream or sys.stdout
            stream.write("\n".join(lines) + "\n")
            stream.flush()


def install(relay: LineRelay) -> None:
    """Put the relay in place of Ray's own printing of worker output, where Ray lets us."""
    try:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
    except ImportError:  # another Ray: its own printing stays
        return
    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("rlkit", lambda data: relay.add(_format(data)))


def _format(data: dict[str, Any]) -> list[str]:
    """Lines of one message of Ray's log monitor, each with the worker it came from.

    Ray's own processes report here too, under names in place of a number: they stay in Ray's logs.
    """
    if not str(data.get("pid", "")).isdigit():
        return []
    name = data.get("actor_name") or data.get("task_name") or "worker"
    prefix = f"({name} pid={data.get('pid')})"
    return [f"{prefix} {line}" for line in data.get("lines", [])]
