"""Docks in a checkpoint: their rows are batches in flight beside the others."""

from collections.abc import Mapping
from typing import Any

from rlkit.dock import TransferDock, saving


def parts_of(docks: Mapping[str, TransferDock]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name -> plain facts of each dock, and the batches of all by names of their own."""
    facts: dict[str, Any] = {}
    batches: dict[str, Any] = {}
    for name, dock in docks.items():
        found = saving.contents(dock)
        keys = [f"dock_{name}_{i}" for i in range(len(found))]
        batches |= {key: batch for key, (_, batch) in zip(keys, found, strict=True)}
        pairs = [[key, partition] for key, (partition, _) in zip(keys, found, strict=True)]
        facts[name] = {"rows": pairs, "stages": saving.state(dock.transport)}
    return facts, batches


def put_back(
    docks: Mapping[str, TransferDock], facts: Mapping[str, Any], batches: dict[str, Any]
) -> None:
    """Enter the rows into the docks; takes their batches out of ``batches``."""
    for name, each in facts.items():
        rows = [(partition, batches.pop(key)) for key, partition in each["rows"]]
        if name in docks:
            saving.put_back(docks[name], rows, each["stages"])
