"""Memory of a worker by category: what it explains itself, what is allocated, and the rest."""

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
QUICK_S = 2e-3
SAME_BYTES = 1 << 20


class Meter:
    """Memory of one worker, looked at when its stages end, and where they ask for it.

    Kept from call to call it knows what the worker held before the next one. A look at a worker
    with a hundred tensors takes 0.1 ms and more, so a call that is quicker than ``QUICK_S`` and
    leaves as much allocated as there was is not looked at: nothing changed. Looks let the device's
    count of its peak begin anew (``rlkit.device.reset_peak``).
    """

    def __init__(self, worker: Any) -> None:
        self.worker, self.device = worker, device_of(worker)
        self._last: dict[str, int] | None = None

    def start(self) -> list[dict[str, int]]:
        """Looks of a span that begins: one so far."""
        if self._last is None:
            device.reset_peak(self.device)
            self._last = self._look(counted(self.device)[0])
        return [self._last]

    def more(self, looks: list[dict[str, int]]) -> None:
        """Look in the middle of a span, unless an earlier look found as much."""
        allocated, _ = counted(self.device)
        if len(looks) == 1 or allocated > max(map(_allocated, looks)) + SAME_BYTES:
            looks.append(self._look(allocated))

    def end(self, looks: list[dict[str, int]], seconds: float) -> tuple[dict[str, int], ...]:
        """Memory before, after, and at the fullest moment known, of a span that ends."""
        allocated, top = counted(self.device)
        before = looks[0]
        same = abs(allocated - before["allocated"]) <= SAME_BYTES
        if seconds < QUICK_S and len(looks) == 1 and same:
            return before, before, before
        after = self._last = self._look(allocated)
        device.reset_peak(self.device)
        fullest = _fullest([*looks, after])
        rise = top - fullest["allocated"]
        if rise > 0:
            # What was there between two looks and is gone: activations, unless they are known.
            kind = "residual" if "activations" in fullest else "activations"
            fullest = fullest | {kind: fullest.get(kind, 0) + rise, "allocated": top}
        return before, after, fullest

    def forget(self) -> None:
        """Begin the next span with a look."""
        self._last = None

    def _look(self, allocated: int) -> dict[str, int]:
        """Bytes by category, and two more: ``allocated``; ``residual``, the unexplained rest."""
        explain = getattr(self.worker, "memory", None)
        found = check_explained(explain(), self.worker) if callable(explain) else {}
        elsewhere = 0 if self.device == "cpu" else found.get("host_swap", 0)
        residual = allocated - sum(found.values()) + elsewhere
        return {**found, "allocated": allocated, "residual": residual}


def _allocated(look: dict[str, int]) -> int:
    return look["allocated"]


def _fullest(looks: list[dict[str, int]]) -> dict[str, int]:
    """The look that found most; of equals, allocators keeping what was freed, it explains most."""
    most = max(map(_allocated, looks))
    equals = [look for look in looks if look["allocated"] >= most - SAME_BYTES]
    return max(equals, key=lambda look: look["allocated"] - look["residual"])


def counted(kind: str) -> tuple[int, int]:
    """Bytes allocated on a device, and the most since the peak's count began; 0 for not counted.

    On CPU it is the resident memory of the process, so workers that share a process have each
    other's in their residual.
    """
    return device.allocated_bytes(kind), device.peak_bytes(kind)


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
