"""Backends: they compute logprobs and gradients."""

from rlkit.backends.megatron_backend import MegatronBackend
from rlkit.backends.megatron_model import MegatronOptions
from rlkit.backends.torch_backend import TorchBackend
from rlkit.backends.torch_options import TorchOptions

__all__ = ["MegatronBackend", "MegatronOptions", "TorchBackend", "TorchOptions"]
