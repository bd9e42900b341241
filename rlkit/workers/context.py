"""What a worker knows of its place.

Its rank among its peers, its device, the run's seed, and how to sum over ranks.
"""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlkit import device as devices
from rlkit import trace, waits
from rlkit.checks import PeerError
from rlkit.config import Layout

__all__ = ["Collective", "PeerError", "Rendezvous", "WorkerContext", "open_meeting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """A worker on its own has the defaults; a cluster passes each worker its own."""

    name: str = "worker"
    """Group name, such as ``actor``."""
    dp_rank: int = 0
    """Rank among the data-parallel peers."""
    dp_size: int = 1
    """Number of data-parallel peers."""
    rank: int = 0
    """Rank among all processes of the group."""
    cut: Layout | None = None
    """How the group's processes share a model; None: each has all of it."""
    device: str = "cpu"
    """torch device of this worker."""
    seed: int = 0
    """Seed of the run, the same for all workers."""
    timeout_s: float = 600.0
    """Limit of every wait for a peer."""
    collective: Any = None
    """``Collective`` over all processes of the group; None for one."""

    @property
    def layout(self) -> Layout:
        """How the group's processes share a model."""
        return Layout(dp=self.dp_size) if self.cut is None else self.cut

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank that holds its copy of the model: it answers for all."""
        if self.cut is None:
            return True
        place = self.cut.coordinates()
        return not any(place[name][self.rank] for name in ("tp", "cp", "pp"))

    @classmethod
    def at(cls, rank: int, size: int, layout: Layout | None, **more: Any) -> "WorkerContext":
        """The context of one of ``size`` processes, in a layout if there is one."""
        if layout is None:
            return cls(rank=rank, dp_rank=rank, dp_size=size, **more)
        layout = layout.on(size)
        place = layout.coordinates()["dp"]
        return cls(
            rank=rank, dp_rank=int(place[rank]), dp_size=int(place.max()) + 1, cut=layout, **more
        )


class Collective:
    """Sums, broadcasts and barriers over a process group; each ends or errs within its timeout.

    A rank waits in Python, so that an interrupt reaches it. After a failure ``group`` is replaced:
    workers keep this object.
    """

    def __init__(self, group: Any, *, rank: int, size: int, name: str, store: Any = None) -> None:
        self.group, self.rank, self.size, self.name = group, rank, size, name
        self.store = store  # where the ranks met, and may meet for another group

    def sum_(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over the ranks, in place."""
        self._run("sum", lambda: self.group.allreduce([tensor]))

    def broadcast_(self, tensor: Tensor, *, root: int) -> None:
        """Overwrite ``tensor`` with the root's."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._run("broadcast", lambda: self.group.broadcast([tensor], options))

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._run("barrier", lambda: self.group.barrier())

    def all_come(self, within_s: float) -> bool:
        """Whether all ranks ask this within so many seconds; if not, only a new group is of use."""
        work, end_s = self.group.barrier(), time.monotonic() + within_s
        while not work.is_completed() and time.monotonic() < end_s:
            time.sleep(1e-3)
        return work.is_completed() and work.is_success()

    def _run(self, what: str, start: Any) -> None:
        try:
            with trace.wait(what):
                waits.finish(start())
        except RuntimeError as error:
            raise PeerError(
                f"{self.name}: {what} over {self.size} ranks failed on rank {self.rank}: a peer "
                f"died, stopped or timed out ({str(error).splitlines()[0]})."
            ) from error


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a process group meet."""

    host: str
    port: int
    name: str
    """Keeps groups apart that meet at one port."""
    size: int
    """Number of ranks."""

    def join(self, rank: int, *, device: str, timeout_s: float, store: Any = None) -> Collective:
        """Enter as ``rank``; ``store`` is the TCPStore of the process that hosts the meeting."""
        if store is None:
            limit = timedelta(seconds=timeout_s)
            store = dist.TCPStore(self.host, self.port, None, False, limit)
        store, kind = dist.PrefixStore(self.name, store), device.split(":")[0]
        group = devices.process_group(
            kind, store=store, rank=rank, size=self.size, timeout_s=timeout_s
        )
        return Collective(group, rank=rank, size=self.size, name=self.name, store=store)


def open_meeting(host: str, *, timeout_s: float) -> Any:
    """A TCPStore on a free port of this process; its ``port`` says which."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, 0, None, True, limit, wait_for_workers=False)
