"""``python reaper.py SESSION``: wait until stdin closes, then end what is left of a Ray session.

Processes are told by the session's name in their command line or environment, or by a parent that
is one of them: nothing else is touched. Only the standard library is imported.
"""

import os
import select
import signal
import sys
import time

PERIOD_S = 3.0
GRACE_S = 4.0

Process = tuple[int, str]
"""Process id and start time: a number that is used again is another process."""


def read_processes() -> dict[Process, tuple[int, bytes]]:
    """Every process of this machine: parent's id, command line and environment."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                text = file.read()
            with open(f"/proc/{entry}/environ", "rb") as file:
                text += file.read()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(entry), fields[19]] = (int(fields[1]), text)
    return found


def of_session(session: str, known: set[Process]) -> set[Process]:
    """Living processes of the session: those that name it, those known, and their descendants."""
    every = read_processes()
    mark, own = session.encode(), os.getpid()
    found = {p for p, (_, text) in every.items() if (mark in text or p in known) and p[0] != own}
    while True:
        ids = {pid for pid, _ in found}
        more = {p for p, (parent, _) in every.items() if parent in ids} - found
        if not more:
            return found
        found |= more


def main(session: str) -> None:
    """Follow the session until the driver ends, give Ray a moment, end what is left."""
    known: set[Process] = set()
    while not stdin_closed(PERIOD_S):
        known = of_session(session, known)
    deadline = time.monotonic() + GRACE_S
    known = of_session(session, known)
    while known and time.monotonic() < deadline:
        time.sleep(0.2)
        known = of_session(session, known)
    for pid, _ in known:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue


def stdin_closed(timeout_s: float) -> bool:
    """Whether the driver has closed its end, waiting up to ``timeout_s`` for it."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the driver
    main(sys.argv[1])
