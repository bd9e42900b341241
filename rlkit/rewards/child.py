"""What the process of a killable reward function runs: one call after another, over a socket."""

import math
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rlkit.rewards.verdict import as_reward


def main(connection: Connection) -> None:
    """Load the function, say so, and answer until the other side closes."""
    number, (payload, memory_gib) = connection.recv()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # may be lowered, not raised
    memory_bytes = math.ceil(memory_gib * 2**30)
    if hard == resource.RLIM_INFINITY or memory_bytes < hard:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    process, found = os.getpid(), []
    reply = answer(lambda: found.append(cloudpickle.loads(payload)))
    while os.getpid() == process:  # what the function forked must not answer in its place
        try:
            connection.send((number, *reply))
            number, (row, timeout_s) = connection.recv()
        except (EOFError, ConnectionError):
            return
        # Nobody kills this process if the other one is gone: then SIGALRM does.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        reply = answer(lambda row=row: as_reward(found[0](*row)))
        signal.setitimer(signal.ITIMER_REAL, 0)
    os._exit(0)


def answer(call: Any) -> tuple[str, Any]:
    """(ok, value), (ran out of memory, None) or (raised, (message, traceback)) of a call."""
    try:
        return "ok", call()
    except MemoryError:
        return "ran out of memory", None
    except Exception as error:
        return "raised", (f"{type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    channel = Connection(int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    main(channel)
