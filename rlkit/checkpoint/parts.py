"""The parts of a run that a checkpoint asks for their state."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlkit.batch.store import LocalStore
from rlkit.checkpoint.folder import Saved
from rlkit.types import RowStore
from rlkit.workers.shards import Receipt

logger = logging.getLogger("rlkit.checkpoint")


def start_saving(target: Path, workers: Mapping[str, Any]) -> dict[str, Any]:
    """Begin the workers' saves, each into a folder of its name: futures by name."""
    running = {}
    for name, group in workers.items():
        (target / name).mkdir(parents=True)
        running[name] = group.submit.save_state(str(target / name))
    return running


def first_receipt(name: str, answers: Any) -> Receipt:
    """What the rank that saved wrote; the others answered None."""
    found = [each for each in (answers if isinstance(answers, list) else [answers]) if each]
    if not found:
        raise RuntimeError(f"workers[{name!r}]: no rank saved anything; need one that does.")
    return {key: facts for receipt in found for key, facts in receipt.items()}


def check_parts(saved: Saved, content: Mapping[str, Any], **parts: Any) -> None:
    """ValueError for parts that the checkpoint has not; a warning for those it has in vain."""
    there = _named({**content, "log": "log.json" in content["files"] or None})
    given = _named(parts)
    absent = [name for name in given if name not in there]
    if absent:
        raise ValueError(
            f"{saved.path}: got no {', '.join(absent)} in this checkpoint, which has the workers "
            f"{content['workers']}; need those that save() was called with."
        )
    if parts["prompts"] is not None:
        parts["prompts"].check_state(content["prompts"])
    unused = [name for name in there if name not in given]
    if unused:
        logger.warning("%s: %s saved there, not loaded", saved.path, ", ".join(unused))


def _named(parts: Mapping[str, Any]) -> list[str]:
    """The parts that are there, in words."""
    names = [*parts["workers"], *(f"dock {name!r}" for name in parts["docks"])]
    return names + [name for name in ("prompts", "log") if parts[name] is not None]


def store_of(workers: Mapping[str, Any]) -> RowStore:
    """Where restored rows go: the cluster's store, or else one in this process."""
    stores = [group.store for group in workers.values()]
    return next((store for store in stores if store is not None), None) or LocalStore()
