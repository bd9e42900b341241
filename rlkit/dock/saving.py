"""What a checkpoint has of a dock: its rows as batches, and what each stage has consumed.

Leases are not saved: whoever held them is gone when a run starts again, and their rows are offered
again. Rows that a stage has acknowledged stay consumed, so training sees each row once relative to
the weights of the checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.batch import Batch
from rlkit.dock.messages import Held
from rlkit.dock.recovery import on_nodes, on_stages
from rlkit.dock.rowtable import RowTable
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Transport

if TYPE_CHECKING:
    from rlkit.dock.dock import TransferDock


@contextmanager
def all_frozen(docks: Iterable["TransferDock"], *, limit_s: float = 60.0) -> Iterator[None]:
    """Nobody acknowledges rows of these docks meanwhile, for at most ``limit_s``."""
    transports = [dock.transport for dock in docks]
    for transport in transports:
        on_stages(transport, "freeze", limit_s=limit_s)
    try:
        yield
    finally:
        for transport in transports:
            on_stages(transport, "freeze", limit_s=0.0)


def contents(dock: "TransferDock") -> list[tuple[str, Batch]]:
    """(partition, batch) of all rows: those with the same columns are one batch."""
    table: RowTable = on_stages(dock.transport, "view")[DRIVER].table
    has = [table["node", name] >= 0 for name in table.columns]
    kinds = np.stack([table["partition"], *has], axis=1)
    found = []
    for kind in np.unique(kinds, axis=0):
        columns = [name for name, there in zip(table.columns, kind[1:], strict=True) if there]
        uids = np.sort(table["uid"][(kinds == kind).all(axis=1)])
        if columns:
            found.append((table.partitions[kind[0]], dock.fetch(uids, columns)))
    return found


def state(transport: Transport) -> dict[str, dict[str, Any]]:
    """Stage -> consumed uids, late ones to refuse, and the highest token, as plain numbers."""
    found = {}
    for stage, saved in on_stages(transport, "snapshot").items():
        done = [held.uids for held in saved["leases"].values() if held.done]
        uids = np.concatenate([np.zeros(0, dtype=np.int64), *done])
        found[stage] = {"consumed": uids.tolist(), "last": saved["last"]}
        found[stage]["retired"] = list(saved["retired"])
    return found


def put_back(
    dock: "TransferDock",
    rows: Sequence[tuple[str, Batch]],
    saved: Mapping[str, Mapping[str, Any]],
) -> None:
    """Empty the dock, and enter what ``contents`` and ``state`` gave, while nobody else uses it."""
    transport = dock.transport
    transport.warehouses("restore", dict.fromkeys(transport.nodes, ([],)))
    for stage in {*transport.stages(), *saved}:
        transport.controllers("restore", {stage: ([], {"leases": {}, "last": 0})}, leased=False)
    for partition, batch in rows:
        groups, versions = batch.meta["group_ids"], batch.meta["policy_version"]
        at = dock.at(partition=partition)
        at._enter(batch.columns, batch.uids, group_ids=groups, policy_version=versions)
    for stage, of in saved.items():
        notices = [n for found in on_nodes(transport, "index", stage).values() for n in found]
        uids = np.asarray(of["consumed"], dtype=np.int64)
        last = of["last"] + 1
        done = Held(token=last, uids=uids, seats={"": 0.0}, acked=frozenset({""}))
        leases = {last: done} if len(uids) else {}
        entered = {"leases": leases, "last": last, "retired": of["retired"]}
        transport.controllers("restore", {stage: (notices, entered)}, leased=False)
        on_nodes(transport, "consumed", stage, uids)
