"""What training goes on from, in a folder: weights, AdamW's moments, version, place in the
learning rate's schedule.
"""

import os
from pathlib import Path
from typing import Any

from rlkit.workers import shards


def save(worker: Any, folder: str | os.PathLike[str]) -> shards.Receipt | None:
    """Write a trainer's state into ``folder``, which must exist: the files' bytes and sha256.

    Data-parallel ranks hold the same, so the first one writes; the others return None.
    """
    if worker.context.dp_rank:
        return None
    folder = Path(folder)
    weights = shards.write_tensors(folder, "weights", worker.backend.state_dict())
    moments = shards.write_tensors(folder, "optimizer", worker.backend.optimizer_state())
    facts = {
        "version": worker.version,
        "optimizer_steps": worker.backend.num_steps,
        "seed": worker.context.seed,
        "weights": list(weights),
        "optimizer": list(moments),
    }
    return weights | moments | shards.write_json(folder / "state.json", facts)


def load(worker: Any, folder: str | os.PathLike[str]) -> int:
    """Put back what ``save`` wrote; returns the policy version.

    An error, another model or run seed for instance, leaves the worker as it was.
    """
    folder = Path(folder)
    facts = shards.read_json(folder / "state.json")
    seed = worker.context.seed
    if facts["seed"] != seed:
        raise ValueError(
            f"{folder}: got a checkpoint of run seed {facts['seed']}, this cluster has {seed}; "
            f"need the same: rk.launch(seed={facts['seed']})."
        )
    weights = shards.read_tensors(folder, facts["weights"])
    shards.check_equal_facts(weights, worker.backend.state_dict(), source=folder)
    moments = shards.read_tensors(folder, facts["optimizer"])
    worker.backend.load_optimizer_state(moments, num_steps=facts["optimizer_steps"])
    worker.backend.load_state_dict(weights)
    return facts["version"]
