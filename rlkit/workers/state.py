"""What training goes on from, in a folder: weights, AdamW's moments, version, place in the
learning rate's schedule.
"""

import os
from pathlib import Path
from typing import Any

from rlkit.workers import shards


def save(worker: Any, folder: str | os.PathLike[str]) -> shards.Receipt | None:
    """Write a trainer's state into ``folder``, which must exist: the files' bytes and sha256.

    All ranks say the same, so the first one writes; the others return None.
    """
    tensors = worker.backend.state_dict(), worker.backend.optimizer_state()
    if worker.context.dp_rank or not worker.context.speaks:
        return None
    folder = Path(folder)
    weights = shards.write_tensors(folder, "weights", tensors[0])
    moments = shards.write_tensors(folder, "optimizer", tensors[1])
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
