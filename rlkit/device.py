"""The only file that knows npu, cuda and cpu.

Names, variables, memory, collective backends, Ray resources.
"""

import glob
import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Platform:
    """Facts of one kind of device."""

    kind: str
    """torch's name of the device type."""
    ray_resource: str
    """What Ray calls one of them."""
    visible_variable: str
    """Environment variable that says which of them a process sees."""
    collective: str
    """torch.distributed backend."""
    files: str
    """Device files, for detection without touching a device."""


NPU = Platform("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "hccl", "/dev/davinci[0-9]*")
CUDA = Platform("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nccl", "/dev/nvidia[0-9]*")
CPU = Platform("cpu", "CPU", "", "gloo", "")
PLATFORMS = {p.kind: p for p in (NPU, CUDA, CPU)}


def platform(kind: str) -> Platform:
    """Facts of ``kind``; ``auto`` picks what this machine has, accelerators first."""
    if kind == "auto":
        return next((p for p in (NPU, CUDA) if num_devices(p.kind)), CPU)
    if kind not in PLATFORMS:
        raise ValueError(f"devices: got {kind!r}, need one of auto, {', '.join(PLATFORMS)}.")
    return PLATFORMS[kind]


def num_devices(kind: str) -> int:
    """How many devices of ``kind`` this process may use, found without starting a driver."""
    facts = platform(kind)
    if facts is CPU:
        return os.cpu_count() or 1
    if facts is NPU and importlib.util.find_spec("torch_npu") is None:
        return 0
    visible = os.environ.get(facts.visible_variable)
    if visible is not None:
        return len([x for x in visible.split(",") if x.strip() not in ("", "-1")])
    return len(glob.glob(facts.files))


def torch_device(kind: str, index: int = 0) -> Any:
    """torch.device of one device; loads the backend that it needs."""
    import torch

    if kind == NPU.kind and not hasattr(torch, "npu"):
        import torch_npu  # noqa: F401  (registers the device)
    return torch.device(kind) if kind == CPU.kind else torch.device(kind, index)


def synchronize(device: Any) -> None:
    """Wait until the device has done what was asked of it."""
    kind = getattr(device, "type", str(device).split(":")[0])
    if kind == CPU.kind:
        return
    import torch

    getattr(torch, kind).synchronize(device)


def process_group(kind: str, *, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of its own over ``store``, beside torch's default one.

    Collectives end after ``timeout_s``.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=timeout_s)
    collective = platform(kind).collective
    if collective == CPU.collective:
        return dist.ProcessGroupGloo(store, rank, size, limit)
    if collective == CUDA.collective:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    import torch_npu

    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options._timeout = limit
    return torch_npu._C._distributed_c10d.ProcessGroupHCCL(store, rank, size, options)
