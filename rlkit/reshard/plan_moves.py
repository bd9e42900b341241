"""What a strategy decided: the moves, bucket by bucket."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rlkit.reshard import memory, plan_frames
from rlkit.reshard.plan_cells import Block, Cut

BUCKET_BYTES = 64 << 20


class Moves(NamedTuple):
    """All moves of a plan [N], in the order in which they travel."""

    block: np.ndarray
    """Index into ``ReshardPlan.blocks``."""
    layer: np.ndarray
    source: np.ndarray
    target: np.ndarray
    cell: np.ndarray
    nbytes: np.ndarray
    needed: np.ndarray
    bucket: np.ndarray
    """Moves of a bucket travel together. Both ends go by it, so nobody waits in a circle."""


@dataclass(frozen=True)
class ReshardPlan:
    """What moves between two layouts of one model; made by ``plan_reshard``."""

    cut: Cut
    strategy: str
    blocks: tuple[Block, ...]
    swaps: bool = False
    """Training shards are in host memory during generation, and generation's are gone in
    training."""
    bucket_bytes: int = BUCKET_BYTES
    """Most that a device receives at a time."""
    splits: bool = False
    """Tensors are cut where a bucket ends; else one that is larger than a bucket goes alone."""

    @property
    def nbytes(self) -> int:
        """Bytes that travel between devices."""
        return self.totals()["gather"]

    def totals(self) -> dict[str, int]:
        """Bytes by phase, all devices together: the sums of ``frame()``, without making it."""
        local, remote = (
            sum(int(b.nbytes[b.remote == way].sum()) * len(b.layers) for b in self.blocks)
            for way in (False, True)
        )
        swapped = int(self.cut.train.nbytes(self.cut.table).sum()) if self.swaps else 0
        return {"copy": local, "gather": remote, "swap_out": swapped, "swap_in": swapped}

    @cached_property
    def moves(self) -> Moves:
        """Every move, sorted by bucket."""
        counts = [len(b.source) * len(b.layers) for b in self.blocks]
        block = np.repeat(np.arange(len(self.blocks)), counts)
        layer = np.concatenate([np.repeat(b.layers, len(b.source)) for b in self.blocks])
        rest = [
            np.concatenate([np.tile(getattr(b, name), len(b.layers)) for b in self.blocks])
            for name in ("source", "target", "cell", "nbytes", "needed")
        ]
        tensor = np.unique(block * (int(layer.max()) + 2) + layer + 1, return_inverse=True)[1]
        source, target, _, nbytes, _ = rest
        sizes = np.where(source == target, 0, nbytes)
        cut_buckets = self._pieces_to_buckets if self.splits else self._tensors_to_buckets
        bucket = cut_buckets(tensor, target, sizes)
        order = np.lexsort((tensor, bucket))
        return Moves(*(column[order] for column in (block, layer, *rest, bucket)))

    def _pieces_to_buckets(
        self, tensor: np.ndarray, target: np.ndarray, sizes: np.ndarray
    ) -> np.ndarray:
        """Bucket [N] of each move: no target's is over ``bucket_bytes``, for a new one begins when
        one is half full, and no piece is larger than half of it.
        """
        order = np.lexsort((tensor, target))
        total, first = np.cumsum(sizes[order]), np.searchsorted(target[order], target[order])
        before = total - sizes[order] - np.where(first > 0, total[first - 1], 0)
        buckets = np.empty_like(tensor)
        buckets[order] = before // (self.bucket_bytes // 2)
        return buckets

    def _tensors_to_buckets(
        self, tensor: np.ndarray, target: np.ndarray, sizes: np.ndarray
    ) -> np.ndarray:
        """Bucket [N] of each move: whole tensors, as many as no target gets too much of."""
        received = np.zeros((int(tensor.max()) + 1, self.cut.num_devices), dtype=np.int64)
        np.add.at(received, (tensor, target), sizes)
        buckets, used = [], self.bucket_bytes + 1  # the first begins a bucket, even of nothing
        for most in received.max(1).tolist():
            full = used + most > self.bucket_bytes
            buckets.append((buckets[-1] if buckets else -1) + int(full))
            used = most if full else used + most
        return np.array(buckets)[tensor]

    # ---- tables ----

    def frame(self) -> Any:
        """DataFrame, a row a move: phase, bucket, source, target, tensor, slice, bytes.

        Phases: ``copy`` within a device, ``gather`` between two, ``swap_out`` and ``swap_in``
        between a device (source and target) and its host.
        """
        return plan_frames.moves(self)

    def memory(self) -> Any:
        """DataFrame: device, phase, part, category, bytes; see ``rlkit.reshard.memory``."""
        return memory.frame(self)

    def peak_bytes(self) -> int:
        """Most that one device holds in any phase."""
        return memory.peak(self)

    def residual_bytes(self) -> int:
        """Most that one device holds during generation and generation does not use."""
        return memory.residual(self)

    def map(self, tensor: str) -> Any:
        """DataFrame of who holds which part of a tensor: side, rank, experts, slice, stored_in.

        tensor: a Hugging Face name such as ``model.layers.3.self_attn.q_proj.weight``; of experts
        with ``*`` for their number.
        """
        return plan_frames.holders(self.cut, tensor)

    def __repr__(self) -> str:
        ways = " to ".join(side.layout.short() for side in (self.cut.train, self.cut.infer))
        return (
            f"ReshardPlan({self.strategy}, {ways} on {self.cut.num_devices} devices, "
            f"{self.nbytes:,} bytes between them)"
        )

    def _repr_html_(self) -> str:
        return f"<b>{self!r}</b>{memory.by_phase(self).head(10).to_html(index=False)}"
