"""Engines: they generate."""

from rlkit.engines.requests import Request, Response
from rlkit.engines.torch_engine import TorchEngine

__all__ = ["Request", "Response", "TorchEngine"]
