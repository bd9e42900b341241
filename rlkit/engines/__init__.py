"""Engines: they generate."""

from rlkit.engines.requests import Request, Response
from rlkit.engines.serve import serve, too_old
from rlkit.engines.torch_engine import TorchEngine

__all__ = ["Request", "Response", "TorchEngine", "serve", "too_old"]
