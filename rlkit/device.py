"""The only file that knows npu, cuda and cpu.

Detection, variables, memory, streams, host copies, collectives, Ray resources. A ``device`` is a
torch.device or its name.
"""

import functools
import glob
import importlib.util
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import takewhile
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
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NONE_VISIBLE = ("", "-1", "NoDevFiles")  # what ends a list of devices: CUDA's and Ray's words

# ---- which devices there are ----


def platform(kind: str) -> Platform:
    """Facts of ``kind``; ``auto`` picks what this machine has, accelerators first."""
    if kind == "auto":
        return next((p for p in (NPU, CUDA) if num_devices(p.kind)), CPU)
    if kind not in PLATFORMS:
        raise ValueError(f"devices: got {kind!r}, need one of auto, {', '.join(PLATFORMS)}.")
    return PLATFORMS[kind]


def num_devices(kind: str) -> int:
    """How many devices of ``kind`` this process may use, found without starting a driver.

    An accelerator counts if this torch can use it: none without a torch build or package for it.
    """
    facts = platform(kind)
    if facts is CPU:
        return os.cpu_count() or 1
    if not _usable(facts):
        return 0
    num_files = len(glob.glob(facts.files))
    if not num_files:  # nothing that could be started; a backend may have devices without files
        module = _loaded(facts)
        return 0 if module is None else int(module.device_count())
    ids = visible(kind)
    if ids is None:
        return num_files
    return sum(1 for _ in takewhile(lambda x: not x.isdigit() or int(x) < num_files, ids))


def _usable(facts: Platform) -> bool:
    """Whether this torch was built for the kind, or has a backend for it installed or loaded."""
    if facts is CUDA:
        import torch

        return torch.version.cuda is not None
    return _loaded(facts) is not None or importlib.util.find_spec("torch_npu") is not None


def _loaded(facts: Platform) -> Any:
    """torch's module of a device kind, if it is loaded."""
    import torch

    return getattr(torch, facts.kind, None)


def visible(kind: str) -> list[str] | None:
    """Ids of the devices that the environment lets this process see; None: all there are."""
    value = os.environ.get(platform(kind).visible_variable)
    if value is None:
        return None
    return list(takewhile(lambda x: x not in NONE_VISIBLE, map(str.strip, value.split(","))))


def restrict(kind: str, ids: Sequence[str]) -> None:
    """Let this process see only these devices, an empty list for none.

    Call it before the first tensor on a device: drivers read the variable once.
    """
    variable = platform(kind).visible_variable
    if variable:
        os.environ[variable] = ",".join(ids)


def ray_options(kind: str, num: int) -> dict[str, Any]:
    """``num`` devices as Ray asks for them, of a node (``ray.init``) or an actor (``options``).

    A CPU device is one of Ray's CPU slots; workers on them share the machine's cores.
    """
    facts = platform(kind)
    if facts is CPU:
        return {"num_cpus": num}
    return {"num_gpus": num} if facts is CUDA else {"resources": {facts.ray_resource: num}}


def quiet_detection() -> None:
    """Silence Ray's error log on machines without NPUs; before ray is imported."""
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)


def _module(device: Any) -> Any:
    """torch's module of an accelerator, loaded if need be; None for a CPU."""
    facts = platform(getattr(device, "type", str(device).split(":")[0]))
    if facts is CPU:
        return None
    if _loaded(facts) is None:
        import torch_npu  # noqa: F401  (registers the device)
    return _loaded(facts)


# ---- memory and time ----


def synchronize(device: Any) -> None:
    """Wait until the device has done what was asked of it."""
    module = _module(device)
    if module is not None:
        module.synchronize(device)


def allocated_bytes(device: Any) -> int:
    """Bytes of this process's tensors on the device; on a CPU, resident memory of the process."""
    module = _module(device)
    if module is not None:
        return int(module.memory_allocated(device))
    statm = _own_file("statm", os.getpid())  # a tenth of the time of status
    return int(os.pread(statm, 256, 0).split()[1]) * _PAGE_BYTES if statm >= 0 else 0


def peak_bytes(device: Any) -> int:
    """Highest ``allocated_bytes`` since ``reset_peak``; 0 on a CPU whose system can't reset it."""
    module = _module(device)
    if module is not None:
        return int(module.max_memory_allocated(device))
    if _own_file("clear_refs", os.getpid()) < 0:
        return 0
    status = os.pread(_own_file("status", os.getpid()), 4096, 0)
    return int(status.partition(b"VmHWM:")[2].split()[0]) * 1024


def reset_peak(device: Any) -> None:
    """Let ``peak_bytes`` begin anew at what is allocated now."""
    module = _module(device)
    if module is not None:
        module.reset_peak_memory_stats(device)
    elif (clear_refs := _own_file("clear_refs", os.getpid())) >= 0:
        os.pwrite(clear_refs, b"5", 0)


@functools.cache
def _own_file(name: str, pid: int) -> int:
    """A file of Linux about this process, kept open: opening takes five times as long as reading.

    -1 where there is none.
    """
    flags = os.O_WRONLY if name == "clear_refs" else os.O_RDONLY
    try:
        return os.open(f"/proc/{pid}/{name}", flags | os.O_CLOEXEC)
    except OSError:
        return -1


def total_bytes(device: Any) -> int:
    """Memory of the device; on a CPU, of the machine. Starts the driver of an accelerator."""
    module = _module(device)
    if module is None:
        return _PAGE_BYTES * os.sysconf("SC_PHYS_PAGES")
    return int(module.mem_get_info(device)[1])


def empty_cache(device: Any) -> None:
    """Give memory that torch keeps for later tensors back to the device."""
    module = _module(device)
    if module is not None:
        module.empty_cache()


# ---- streams, and copies in host memory ----


@contextmanager
def side_stream(device: Any) -> Iterator[None]:
    """Queue the work of the ``with`` body beside the device's other work, after what is queued now.

    Work queued after the body waits for it. A CPU has one queue: the body just runs.
    """
    module = _module(device)
    if module is None:
        yield
        return
    main, side = module.current_stream(device), module.Stream(device=device)
    side.wait_stream(main)
    with module.stream(side):
        yield
    main.wait_stream(side)


def pin(tensor: Any, device: Any) -> Any:
    """The tensor in page-locked host memory, quickest to copy to ``device``; itself for a CPU."""
    return tensor if _module(device) is None else tensor.pin_memory()


def to_host(value: Any) -> Any:
    """Tensors, also those in dicts, lists and tuples, in host memory; anything else as it is."""
    if type(value) is dict:
        return {key: to_host(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_host, value))
    return value.cpu() if hasattr(value, "untyped_storage") else value


def offload(tensor: Any) -> Any:
    """Move a tensor's bytes to host memory and free them on its device: the bytes, for ``onload``.

    The tensor stays the same object, so optimizers keep it (``module.to`` would make new parameters
    on an NPU), but must not be read meanwhile. On a CPU nothing moves.
    """
    import torch

    if _module(tensor.device) is None:
        return tensor
    storage = tensor.untyped_storage()
    bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
    host.copy_(bytes_)  # waits for the copy: only then may the memory go
    storage.resize_(0)
    return host


def onload(tensor: Any, host: Any) -> None:
    """Bring back the bytes that ``offload`` returned for this tensor."""
    import torch

    if host is tensor:
        return
    storage = tensor.untyped_storage().resize_(len(host))
    torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).copy_(host)


# ---- collectives ----


def process_group(kind: str, *, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A process group of its own over ``store``, beside torch's default one.

    Tensors of the kind go by its backend, those in host memory by gloo; ends after ``timeout_s``.
    """
    import torch
    import torch.distributed as dist

    group, limit = dist.ProcessGroup(store, rank, size), timedelta(seconds=timeout_s)
    for facts in dict.fromkeys((CPU, platform(kind))):
        place = (dist.PrefixStore(facts.kind, store), rank, size, limit)
        backend, name = _collective(facts, *place)
        group._register_backend(torch.device(facts.kind), name, backend)
        group._set_default_backend(name)
    return group


def _collective(facts: Platform, store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """(backend, its type) of a platform's collectives."""
    import torch.distributed as dist

    names = dist.ProcessGroup.BackendType
    if facts is CPU:
        return dist.ProcessGroupGloo(store, rank, size, limit), names.GLOO
    if facts is CUDA:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options), names.NCCL
    _module(facts.kind)  # registers its backend
    place = dist.distributed_c10d._DistributedBackendOptions()
    place.store, place.group_rank, place.group_size, place.timeout = store, rank, size, limit
    place.group_id, place.global_ranks_in_group = "", []
    return dist.Backend._plugins[facts.collective.upper()].creator_fn(place, None), names.CUSTOM
