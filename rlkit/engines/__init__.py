"""Engines: they generate."""

from rlkit.engines.requests import Request, Response
from rlkit.engines.torch_engine import TorchEngine
from rlkit.engines.vllm_engine import VLLMEngine

__all__ = ["Request", "Response", "TorchEngine", "VLLMEngine"]
