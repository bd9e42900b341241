"""Makes megatron-core run where it was not written for: on a CPU, and on Ascend NPUs.

**CPU** (tests, laptops). megatron-core 0.16 asks ``torch.cuda`` for its device, for random states,
streams and buffers. ``patches`` answers for it, only while a backend's method runs, and only on a
machine without an accelerator. All "random states" are then the CPU's one generator, so dropout
above 0 would not differ between tensor-parallel ranks; rlkit uses none.

**NPU** (read, not run). MindSpeed replaces megatron-core's kernels and, through torch_npu's
``transfer_to_npu``, its ``torch.cuda`` calls. Its adaptor must be imported after torch_npu and
before the first import of megatron-core, so ``prepare`` does both, in that order. MindSpeed's
branch names the megatron-core release it fits; ``CUDA_DEVICE_MAX_CONNECTIONS=1`` must be set before
the first use of the device when tensor-parallel communication is to overlap.
"""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange")


def prepare(device: torch.device) -> None:
    """Load what must come before megatron-core; ImportError says what is to be installed."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # A dozen a worker, of TransformerEngine and Apex, which are not used here.
    warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
    # Of torch 2.13, for what megatron-core calls; torch's name, not the caller's, is in it.
    old = r"`torch\.distributed\.\w+` is deprecated"
    warnings.filterwarnings("ignore", message=old, category=FutureWarning)
    if device.type == "npu" and importlib.util.find_spec("mindspeed"):
        import mindspeed.megatron_adaptor  # noqa: F401  (imports torch_npu first)
    if importlib.util.find_spec("megatron") is None:
        raise ImportError(
            "MegatronBackend: megatron-core is not installed, need version 0.16. "
            "pip install 'rlkit[megatron]'."
        )
    if device.type == "cpu":
        _mend_experts()


def seed() -> None:
    """Make Megatron's trackers of random states, which it asks for although nothing here draws."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(1)


@contextmanager
def patches(device: torch.device) -> Iterator[None]:
    """Let megatron-core's calls of ``torch.cuda`` work on a CPU inside the ``with``."""
    if device.type != "cpu":
        yield
        return
    with ExitStack() as stack:
        for owner, name, value in _replacements():
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, what stands in for it)."""
    from megatron.core.tensor_parallel import random

    cuda = torch.cuda
    get_state = lambda *_, **__: torch.get_rng_state()
    found = [
        (cuda, "current_device", lambda: "cpu"),
        (cuda, "synchronize", lambda *_: None),
        (cuda, "get_rng_state", get_state),
        (cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        (cuda, "Stream", _Stream),
        (cuda, "Event", _Stream),
        (cuda, "current_stream", _Stream),
        (cuda, "stream", lambda _: nullcontext()),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "type", _type_of(torch.Tensor.type)),
        (random, "_get_cuda_rng_state", get_state),
        (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
    ]
    return found + [(torch, name, _on_cpu(getattr(torch, name))) for name in FACTORIES]


class _Stream:
    """A stream or an event of a device that has one queue."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any) -> None: ...

    wait_stream = wait_event = record = synchronize = _nothing

    def record_event(self, *_: Any) -> "_Stream":
        return self


def _on_cpu(factory: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def _type_of(original: Any) -> Any:
    """``Tensor.type`` that calls a CPU's tensors torch.cuda's: the optimizers compare this name."""

    def type_(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(tensor).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(tensor, dtype, *args, **kwargs)

    return type_


def _mend_experts() -> None:
    """Two functions of the mixture of experts that a CPU can't run, for good: they are Megatron's
    own.
    """
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if isinstance(tensor, torch.Tensor) and as_numpy else tensor

    modules: tuple[Any, ...] = moe_utils, token_dispatcher
    for module in modules:
        module.maybe_move_tensor_to_cpu = to_cpu
    if not hasattr(moe_utils, "te_general_gemm"):  # only TransformerEngine's import defines it
        modules[0].te_general_gemm = None
