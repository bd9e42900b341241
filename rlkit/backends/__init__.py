"""Backends: they compute logprobs and gradients."""

from rlkit.backends.megatron_backend import MegatronBackend
from rlkit.backends.megatron_model import MegatronOptions
from rlkit.backends.torch_backend import TorchBackend

__all__ = ["MegatronBackend", "MegatronOptions", "TorchBackend"]
