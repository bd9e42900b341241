"""rlkit: reinforcement learning of language models from a notebook.

Public names load when first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "Batch": "rlkit.batch",
    "Column": "rlkit.batch.store",
    "ModelSpec": "rlkit.config",
    "Layout": "rlkit.config",
    "SamplingParams": "rlkit.config",
    "OptimConfig": "rlkit.config",
    "MetricLog": "rlkit.metrics",
    "RunRecord": "rlkit.record",
    "Trace": "rlkit.trace",
    "TorchEngine": "rlkit.engines",
    "VLLMEngine": "rlkit.engines",
    "TorchBackend": "rlkit.backends",
    "TorchOptions": "rlkit.backends",
    "MegatronBackend": "rlkit.backends",
    "MegatronOptions": "rlkit.backends",
    "RolloutWorker": "rlkit.workers",
    "ActorWorker": "rlkit.workers",
    "CriticWorker": "rlkit.workers",
    "ReferenceWorker": "rlkit.workers",
    "WorkerContext": "rlkit.workers",
    "launch": "rlkit.cluster",
    "WorkerGroup": "rlkit.cluster",
    "RolloutFeed": "rlkit.cluster",
    "Resharder": "rlkit.reshard",
    "plan_reshard": "rlkit.reshard",
    "Checkpointer": "rlkit.checkpoint",
    "TransferDock": "rlkit.dock",
    "CentralDock": "rlkit.dock",
    "score": "rlkit.tasks",
    "evaluate": "rlkit.tasks",
    "check_setup": "rlkit.checkup",
}
_MODULES = (
    "algo", "backends", "batch", "checkpoint", "cluster", "config", "device", "dock", "engines",
    "exporters", "metrics", "models", "nb", "recipes", "record", "reshard", "rewards", "schedule",
    "sim", "tasks", "trace", "viz", "workers",
)  # fmt: skip

__all__ = sorted([*_NAMES, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"rlkit.{name}")
    else:
        from rlkit.checks import did_you_mean

        near = did_you_mean(name, __all__)
        raise AttributeError(f"rlkit has no {name!r}; it has {', '.join(__all__)}.{near}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
