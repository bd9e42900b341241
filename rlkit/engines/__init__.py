"""Engines: they generate."""

from rlkit.engines.torch_engine import Request, Response, TorchEngine

__all__ = ["Request", "Response", "TorchEngine"]
