"""The driver's own state as plain values: random generators and the metric log."""

import random
from typing import Any

import numpy as np
import torch

from rlkit.functions import Source
from rlkit.metrics import MetricLog


def random_state() -> dict[str, Any]:
    """States of the global generators of Python, NumPy and torch; workers draw by the seed rule."""
    version, internal, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 (users' cells may draw from it)
    return {
        "python": [version, list(internal), gauss],
        "numpy": numpy | {"state": {"key": numpy["state"]["key"].tolist(),
                                    "pos": int(numpy["state"]["pos"])}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }  # fmt: skip


def set_random_state(state: dict[str, Any]) -> None:
    """Put the states of ``random_state`` back."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    key = np.asarray(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state(numpy | {"state": {"key": key, "pos": numpy["state"]["pos"]}})  # noqa: NPY002
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def log_state(log: MetricLog) -> dict[str, Any]:
    """Records of a log, and the sources of the functions that made them."""
    sources = {key: [s.name, s.text, s.hash] for key, s in log.sources.items()}
    return {"records": list(log.records), "sources": sources}


def set_log_state(log: MetricLog, state: dict[str, Any]) -> None:
    """Replace a log's records by saved ones and begin timing the next step."""
    log.records[:] = state["records"]
    log.sources = {key: Source(*fields) for key, fields in state["sources"].items()}
    log.start()
