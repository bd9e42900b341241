"""Memory of a worker by category: what it explains itself, what is allocated, and the rest."""

import os
from collections.abc import Iterable
from typing import Any

from rlkit import device

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "kv_cache",
    "gather_buffers",
    "communicators",
    "host_swap",
)
"""What a worker's ``memory()`` may explain. ``host_swap`` is host memory, whatever the device."""
MOMENTS = ("before", "after", "peak")
"""When the memory of a span is known."""


class Meter:
    """Memory of one worker over one span: looks at both ends, and at any moment between.

    It lets the device's count of its peak begin anew (``rlkit.device.reset_peak``).
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.device = worker, device_of(worker)
        self.looks: list[dict[str, int]] = []
        if self._counts_peak():
            device.reset_peak(self.device)
        self.look()

    def _counts_peak(self) -> bool:
        return self.device != "cpu" or _CPU_COUNTS_PEAK

    def look(self) -> None:
        """Look now."""
        self.looks.append(sample(self.worker))

    def end(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Look for the last time: memory before, after, and at the fullest moment known."""
        self.look()
        fullest = max(self.looks, key=lambda look: look["allocated"])
        top = device.peak_bytes(self.device) if self._counts_peak() else 0
        rise = top - fullest["allocated"]
        if rise > 0:
            # What was there between two looks and is gone: activations, unless they are known.
            kind = "residual" if "activations" in fullest else "activations"
            fullest = fullest | {kind: fullest.get(kind, 0) + rise, "allocated": top}
        return self.looks[0], self.looks[-1], fullest


def sample(worker: Any) -> dict[str, int]:
    """Bytes by category now, and two more: ``allocated``, and ``residual``, the unexplained rest.

    ``allocated`` is what is allocated on the worker's device; on CPU it is the resident memory of
    the process, so workers that share a process have each other's in their residual.
    """
    explain = getattr(worker, "memory", None)
    found = check_explained(explain(), worker) if callable(explain) else {}
    kind = device_of(worker)
    on_device = sum(found.values()) - (0 if kind == "cpu" else found.get("host_swap", 0))
    allocated = device.allocated_bytes(kind)
    return {**found, "allocated": allocated, "residual": allocated - on_device}


def device_of(worker: Any) -> str:
    """Device of the worker's context; ``cpu`` for a worker without one."""
    name = str(getattr(getattr(worker, "context", None), "device", "cpu"))
    return "cpu" if name.startswith("cpu") else name


def check_explained(found: Any, worker: Any) -> dict[str, int]:
    """What ``memory()`` returned, zeros left out; an error names a category we do not know."""
    name = type(worker).__name__
    if not isinstance(found, dict):
        raise TypeError(
            f"{name}.memory: got {type(found).__name__}, need a dict of bytes by category, such as "
            "{'weights': trace.storage_bytes(tensors)}."
        )
    unknown = sorted(found.keys() - set(CATEGORIES))
    if unknown:
        raise ValueError(
            f"{name}.memory: got categories {unknown}, need some of {', '.join(CATEGORIES)}. "
            "Leave out what fits none: it shows as the residual."
        )
    return {category: int(size) for category, size in found.items() if size}


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of tensors; one that several tensors share counts once."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


_CPU_COUNTS_PEAK = os.access("/proc/self/clear_refs", os.W_OK)
