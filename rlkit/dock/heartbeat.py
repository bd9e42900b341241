"""Heartbeats of a holder that is busy computing."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rlkit.checks import finite
from rlkit.dock.dock import TransferDock

logger = logging.getLogger("rlkit.dock")


@contextmanager
def keep_alive(dock: TransferDock, *, every_s: float = 10.0) -> Iterator[None]:
    """Keeps all leases of ``dock``'s holder while the ``with`` runs, from a thread of its own.

    ``every_s`` is best a third of the lease time, so that one lost heartbeat does no harm. When a
    process dies, so does its thread, and its leases run out.
    """
    if not isinstance(dock, TransferDock) or not finite("every_s", every_s):
        raise TypeError(
            f"keep_alive: got {type(dock).__name__} every {every_s} s, need a dock and more than 0."
        )
    over = threading.Event()

    def beat() -> None:
        while not over.wait(every_s):
            try:
                dock.heartbeat()
            except (RuntimeError, TimeoutError, OSError) as error:  # a controller starts again
                logger.warning("heartbeat of %s: %s", dock.holder, error)

    thread = threading.Thread(target=beat, name=f"heartbeat of {dock.holder}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
