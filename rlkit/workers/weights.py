"""Weights on the move between workers: fingerprints, and buckets over a process group."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit.reshard.fingerprints import compare, fingerprint, fingerprints
from rlkit.workers.context import Collective, Rendezvous, open_meeting

__all__ = ["Link", "compare", "fingerprint", "fingerprints", "own_address", "receive", "send"]


def send(
    group: Collective, weights: Mapping[str, Tensor], buckets: Sequence[Sequence[Any]]
) -> None:
    """Broadcast buckets of whole tensors, then their fingerprints, from rank 0."""
    names = [facts.name for bucket in buckets for facts in bucket]
    for bucket in buckets:
        group.broadcast_(torch.cat([weights[facts.name].reshape(-1) for facts in bucket]), root=0)
    sums = torch.tensor([fingerprint(weights[name]) for name in names], dtype=torch.int64)
    group.broadcast_(sums, root=0)


def receive(
    group: Collective, buckets: Sequence[Sequence[Any]], *, device: Any
) -> dict[str, Tensor]:
    """Tensors of ``send``, compared with the sender's fingerprints."""
    weights: dict[str, Tensor] = {}
    for bucket in buckets:
        sizes = [_numel(facts.shape) for facts in bucket]
        flat = torch.empty(sum(sizes), dtype=getattr(torch, bucket[0].dtype), device=device)
        group.broadcast_(flat, root=0)
        for facts, piece in zip(bucket, flat.split(sizes), strict=True):
            weights[facts.name] = piece.view(facts.shape)
    sums = torch.zeros((len(weights), 2), dtype=torch.int64)
    group.broadcast_(sums, root=0)
    compare(dict(zip(weights, map(tuple, sums.tolist()), strict=True)), weights)
    return weights


class Link:
    """A worker's end of the process group that weights travel over."""

    def __init__(self, *, device: str) -> None:
        self.device = device
        self.group: Collective | None = None
        self._store: Any = None

    def meet(self, *, timeout_s: float) -> tuple[str, int]:
        """Open a meeting point in this process: (host, port)."""
        host = own_address()
        self._store = open_meeting(host, timeout_s=timeout_s)
        return host, self._store.port

    def join(self, meeting: Rendezvous, rank: int, *, timeout_s: float) -> None:
        """Enter the group as ``rank``; rank 0 is where the meeting point is."""
        store = self._store if rank == 0 else None
        self.group = meeting.join(rank, device=self.device, timeout_s=timeout_s, store=store)

    def get(self) -> Collective:
        """The group, or an error if nobody joined it."""
        if self.group is None:
            raise RuntimeError("reshard: this worker has joined no link; call Resharder.reshard().")
        return self.group


def own_address() -> str:
    """Address of this machine that peers reach it by."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("203.0.113.1", 9)
            )  # a documentation address; a datagram socket sends nothing here
            return probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _numel(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
