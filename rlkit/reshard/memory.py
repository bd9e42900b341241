"""Memory of a plan: bytes that each device holds by phase.

Phases: ``train``; ``gather``, its fullest moment; ``generate``; ``restore``, when training shards
come back (plans that swap). Weights only: gradients, optimizer and cache are not the plan's.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rlkit.reshard.plan_moves import ReshardPlan

CATEGORY = {
    "training": "weights",
    "generation": "weights",
    "buffers": "gather_buffers",
    "host": "host_swap",
}
"""Categories of ``rlkit.trace`` by part."""


def of_devices(plan: "ReshardPlan") -> dict[str, dict[str, np.ndarray]]:
    """Bytes of each device [devices] by phase and part."""
    cut = plan.cut
    training, generation = (np.zeros(cut.num_devices, dtype=np.int64) for _ in range(2))
    for side, held in ((cut.train, training), (cut.infer, generation)):
        held[side.first_rank : side.first_rank + side.num_ranks] = side.nbytes(cut.table)
    both = {"training": training, "generation": generation}
    phases = {"gather": both | {"buffers": _buffers(plan)}}
    if not plan.swaps:
        return {"train": both} | phases | {"generate": both}
    return {
        "train": {"training": training},
        **phases,
        "generate": {"generation": generation, "host": training},
        "restore": {"training": training, "host": training},
    }


def frame(plan: "ReshardPlan") -> Any:
    """DataFrame: device, phase, part, category, bytes; ``host_swap`` is not on the device."""
    import pandas as pd

    devices = np.arange(plan.cut.num_devices)
    parts = [
        pd.DataFrame({"device": devices, "phase": phase, "part": part,
                      "category": CATEGORY[part], "bytes": held})
        for phase, by_part in of_devices(plan).items()
        for part, held in by_part.items()
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def by_phase(plan: "ReshardPlan", device: int | None = None) -> Any:
    """DataFrame of one device, by default the one that is fullest: phase, category, bytes.

    ``rk.viz.plot_memory`` draws it.
    """
    if device is None:
        device = int(max(_on_device(plan).values(), key=np.max).argmax())
    held = frame(plan).query("device == @device")
    return held.groupby(["phase", "category"], sort=False, as_index=False)["bytes"].sum()


def peak(plan: "ReshardPlan") -> int:
    """Most that one device holds in any phase."""
    return max(int(held.max()) for held in _on_device(plan).values())


def residual(plan: "ReshardPlan") -> int:
    """Most that one device holds during generation without using it: training shards."""
    held = of_devices(plan)["generate"]
    users = held["generation"] > 0
    return int((held["training"] * users).max()) if "training" in held else 0


def _on_device(plan: "ReshardPlan") -> dict[str, np.ndarray]:
    return {
        phase: sum((held for part, held in parts.items() if part != "host"), np.int64(0))
        for phase, parts in of_devices(plan).items()
    }  # type: ignore[return-value]


def _buffers(plan: "ReshardPlan") -> np.ndarray:
    """Bound on the bytes [devices] in flight at once: a bucket, or the largest tensor that goes
    alone, received and not yet in place; and two messages being sent, none larger than that.
    """
    size = plan.cut.num_devices
    received, sent = np.zeros((2, size), dtype=np.int64)
    largest = np.zeros((2, size), dtype=np.int64)  # received of one tensor, sent of it to one peer
    for block in plan.blocks:
        far = block.remote
        source, target = block.source[far], block.target[far]
        nbytes, times = block.nbytes[far], len(block.layers)
        arriving, leaving = (_sums(ranks, nbytes, size) for ranks in (target, source))
        received, sent = received + times * arriving, sent + times * leaving
        pair = _sums(source.astype(np.int64) * size + target, nbytes, size * size)
        to_one = pair.reshape(size, size).max(1)
        largest = np.maximum(largest, [arriving, to_one])
    limit = plan.bucket_bytes if plan.splits else np.maximum(plan.bucket_bytes, largest)
    limits = np.broadcast_to(limit, (2, size))
    return np.minimum(received, limits[0]) + np.minimum(sent, 2 * limits[1])


def _sums(index: np.ndarray, nbytes: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(index, nbytes, minlength=size).astype(np.int64)
