"""What the built-in workers hold, by the categories of ``rlkit.trace``."""

from typing import Any

import torch

from rlkit.trace import storage_bytes


def of_backend(backend: Any) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state; a backend that has ``memory()`` is asked."""
    if hasattr(backend, "memory"):
        return backend.memory()
    optimizer = getattr(backend, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return {"weights": storage_bytes(backend.state_dict().values())}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": storage_bytes(parameters),
        "gradients": storage_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": storage_bytes(value for value in moments if isinstance(value, torch.Tensor)),
    }


def of_engine(engine: Any, staged: Any) -> dict[str, int]:
    """Bytes of an engine's weights and key-value cache, and of weights received beside them.

    An engine that has ``memory()`` is asked; of one that has neither, nothing is known.
    """
    if hasattr(engine, "memory"):
        found = dict(engine.memory())
    else:
        weights = engine.weights() if hasattr(engine, "weights") else {}
        found = {"weights": storage_bytes(weights.values())}
        data = getattr(getattr(engine, "cache", None), "data", None)
        if isinstance(data, torch.Tensor):
            found["kv_cache"] = storage_bytes([data])
    if staged:
        buffers = storage_bytes(staged.values())
        found["gather_buffers"] = found.get("gather_buffers", 0) + buffers
    return found
