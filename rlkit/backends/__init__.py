"""Backends: they compute logprobs and gradients."""

from rlkit.backends.torch_backend import TorchBackend

__all__ = ["TorchBackend"]
