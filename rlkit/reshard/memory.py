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
    """Most bytes [devices] in flight at once: received and not yet put in place, and one message
    that is sent. Of bounded buckets it is the bound, or all there is to move if that is less.
    """
    size, limit = plan.cut.num_devices, plan.bucket_bytes
    received, sent = np.zeros((2, len(plan.blocks), size), dtype=np.int64)
    for i, block in enumerate(plan.blocks):
        far, times = block.remote, 1 if limit is None else len(block.layers)
        nbytes = times * block.nbytes[far]
        np.add.at(received[i], block.target[far], nbytes)
        pair = block.source[far].astype(np.int64) * size + block.target[far]
        pairs, which = np.unique(pair, return_inverse=True)
        messages = np.bincount(which, nbytes, minlength=len(pairs)).astype(np.int64)
        np.maximum.at(sent[i], pairs // size, messages)
    if limit is None:
        return received.max(0) + sent.max(0)
    return np.minimum(received.sum(0), limit) + np.minimum(sent.sum(0), limit)
