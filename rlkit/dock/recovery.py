"""What becomes of rows as a whole: freed, lost with a node, saved, put back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlkit.dock.transport import Transport


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A dock as it was; it may be pickled."""

    rows: dict[str, Any]
    """Node -> what its warehouse had."""
    stages: dict[str, Any]
    """Stage -> what it had consumed and leased."""


def on_stages(transport: Transport, method: str, *args: Any, **options: Any) -> dict[str, Any]:
    """Call a method of every controller; stage -> what it returned."""
    calls = dict.fromkeys(transport.stages(), args)
    told = transport.controllers(method, calls, **options)
    return {stage: reply.value for stage, reply in told.items()}


def on_nodes(transport: Transport, method: str, *args: Any) -> dict[str, Any]:
    """Call a method of every warehouse; node -> what it returned."""
    told = transport.warehouses(method, dict.fromkeys(transport.nodes, args))
    return {node: reply.value for node, reply in told.items()}


def forget(transport: Transport, uids: np.ndarray, *, retired: bool = True) -> None:
    """Forget rows everywhere; later writes of ``retired`` ones are dropped."""
    if len(uids):
        on_stages(transport, "forget", uids, retired=retired)
        on_nodes(transport, "free", uids)


def release(transport: Transport, stage: str, uids: np.ndarray, nodes: Sequence[str]) -> None:
    """Free those of a stage's consumed rows, with columns on ``nodes``, that all are done with."""
    done = transport.warehouses("consumed", dict.fromkeys(nodes, (stage, uids)))
    freed = [reply.value for reply in done.values()]
    forget(transport, np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *freed])))


def sweep(transport: Transport) -> None:
    """Free rows whose last holder died between its acknowledgement and their release."""
    for stage, uids in on_stages(transport, "consumed").items():
        release(transport, stage, uids, transport.nodes)


def lost(transport: Transport, node: str) -> np.ndarray:
    """Forget the rows of a node that is gone; returns the uids that must be made again."""
    transport.renew(node)
    told = on_stages(transport, "lost", node)
    last = transport.graph.consumers[-1:] if transport.graph else ()
    everything = np.unique(np.concatenate(list(told.values())))
    uids = told[last[0]] if last else everything
    forget(transport, np.setdiff1d(everything, uids))
    forget(transport, uids, retired=False)
    # A warehouse that started again knows neither the stages nor their ledgers.
    for stage in transport.stages():
        on_nodes(transport, "index", stage)
    on_stages(transport, "recommit")
    return uids


def snapshot(transport: Transport) -> Snapshot:
    """Rows by node and leases by stage; nobody acknowledges while they are read."""
    on_stages(transport, "freeze", limit_s=60.0)
    try:
        return Snapshot(on_nodes(transport, "snapshot"), on_stages(transport, "snapshot"))
    finally:
        on_stages(transport, "freeze", limit_s=0.0)


def restore(transport: Transport, saved: Snapshot) -> None:
    """Put rows and consumption back; what was leased is offered again, older tokens are refused."""
    if not isinstance(saved, Snapshot):
        raise TypeError(
            f"snapshot: got {type(saved).__name__}, need what dock.snapshot() returned. A dock in "
            "a checkpoint comes back with Checkpointer.load(docks=...)."
        )
    nodes = transport.nodes
    writes: dict[str, list[Any]] = {node: [] for node in nodes}
    for i, (node, found) in enumerate(sorted(saved.rows.items())):
        writes[node if node in writes else nodes[i % len(nodes)]] += found
    transport.warehouses("restore", {node: (found,) for node, found in writes.items()})
    for stage in {*transport.stages(), *saved.stages}:
        notices = [n for found in on_nodes(transport, "index", stage).values() for n in found]
        state = saved.stages.get(stage, {"leases": {}, "last": 0})
        transport.controllers("restore", {stage: (notices, state)}, leased=False)
