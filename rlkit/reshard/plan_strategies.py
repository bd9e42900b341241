"""Strategies: functions of a ``Cut`` that say what travels, and what stays on the devices.

One of your own is another such function; pass it to ``plan_reshard``.
"""

from typing import Any

import numpy as np

from rlkit.checks import finite, fits
from rlkit.reshard.plan_cells import Cut
from rlkit.reshard.plan_moves import ReshardPlan


def naive(cut: Cut, *, bucket_mib: float = 64.0) -> ReshardPlan:
    """Every device gathers each tensor whole and cuts its part; both copies stay."""
    blocks = cut.blocks(lambda held, needed: np.ones_like(needed))
    return ReshardPlan(cut, "naive", blocks, bucket_bytes=_bytes(bucket_mib))


def allgather_swap(cut: Cut, *, bucket_mib: float = 64.0) -> ReshardPlan:
    """Devices gather the training shards they need a part of into generation buffers.

    Then training shards go to host memory, so that nothing redundant is on a device during
    generation; they come back before training (MindSpeed RL, 2507.19017).
    """
    if cut.disjoint:
        raise ValueError(
            "allgather_swap: got layouts on disjoint devices, need both on the same ones: the swap "
            "frees memory for generation where training shards lie, and there are none on the "
            "generation devices. Use strategy=rk.reshard.direct, or colocate the workers."
        )
    blocks, size = cut.blocks(_whole_shards), _bytes(bucket_mib)
    return ReshardPlan(cut, "allgather_swap", blocks, swaps=True, bucket_bytes=size)


def direct(cut: Cut, *, bucket_mib: float = 64.0) -> ReshardPlan:
    """Each device gets only the pieces it lacks, in place, in buckets of bounded size.

    ``functools.partial(direct, bucket_mib=16)`` is another size.
    """
    size = _bytes(bucket_mib)
    blocks = cut.blocks(lambda held, needed: needed, most_bytes=size // 2)
    least = max(blocks, key=lambda block: block.grid.nbytes.max())
    if 2 * least.grid.nbytes.max() > size:
        raise ValueError(
            f"bucket_mib: got {bucket_mib}, {size} bytes, need at least twice a row of "
            f"{least.parameter.named(0)}, {2 * least.grid.nbytes.max()} bytes."
        )
    return ReshardPlan(cut, "direct", blocks, bucket_bytes=size, splits=True)


def check_strategy(strategy: Any) -> None:
    """TypeError for what is no function."""
    if not callable(strategy):
        raise TypeError(
            f"strategy: got {strategy!r}, need a function: rk.reshard.naive, allgather_swap or "
            "direct, or one of yours."
        )
    fits("strategy", strategy, "cut")


def _bytes(bucket_mib: float) -> int:
    size = int(finite("bucket_mib", bucket_mib) * 2**20)
    if size < 2:
        raise ValueError(f"bucket_mib: got {bucket_mib}, need a size such as 64.")
    return size


def _whole_shards(held: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Cells of all shards that a target needs a part of: what an all-gather of them brings."""
    shards = np.unique(held, axis=0).astype(np.int32)  # [shards, C]
    return (needed.astype(np.int32) @ shards.T > 0).astype(np.int32) @ shards > 0
