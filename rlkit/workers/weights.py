"""A worker's end of a weight transfer."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.report import ReshardReport
from rlkit.reshard.run import reshard_over
from rlkit.reshard.shards import Shards
from rlkit.workers.context import Collective, Rendezvous, open_meeting


@dataclass(slots=True)
class _Joined:
    """A process group that weights travel over, and what travels."""

    group: Collective
    plan: ReshardPlan
    store: Any
    """The meeting point, where this process opened it; lives as long as the group."""
    shards: Shards | None = None


class Link:
    """A worker's ends of weight transfers, by the resharder's name: a source may have several."""

    def __init__(self, *, device: str) -> None:
        self.device = device
        self._joined: dict[str, _Joined] = {}
        self._store: Any = None

    def meet(self, *, timeout_s: float) -> tuple[str, int]:
        """Open a meeting point in this process: (host, port)."""
        host = own_address()
        self._store = open_meeting(host, timeout_s=timeout_s)
        return host, self._store.port

    def join(self, meeting: Rendezvous, rank: int, plan: ReshardPlan, *, timeout_s: float) -> None:
        """Enter the group as ``rank``; rank 0 is where the meeting point is."""
        store = self._store if rank == 0 else None
        group = meeting.join(rank, device=self.device, timeout_s=timeout_s, store=store)
        self._joined[meeting.name] = _Joined(group, plan, store)

    def move(
        self, training: Mapping[str, Tensor], *, version: int, link: str
    ) -> tuple[Shards, ReshardReport]:
        """Take part in a reshard: with ``training`` tensors, or, as a target, with none."""
        joined = self._joined.get(link)
        if joined is None:
            raise RuntimeError("reshard: this worker has joined no link; call Resharder.reshard().")
        if joined.shards is None:
            rank = joined.group.rank
            joined.shards = Shards(joined.plan, rank, training, device=self.device)
        joined.shards.training = dict(training)
        try:
            report = reshard_over(joined.group.group, joined.shards, version=version)
        finally:
            joined.shards.training = {}  # they may have been gathered for this
        return joined.shards, report


def own_address() -> str:
    """Address of this machine that peers reach it by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # of documentation; a datagram socket sends nothing
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
