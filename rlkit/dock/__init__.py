"""The transfer dock: rows on the nodes that made them, a controller for each stage.

``TransferDock`` and ``CentralDock`` are what callers use; ``samplers`` choose rows;
``predicted_traffic`` says what a flow will move.
"""

from rlkit.dock.dock import CentralDock, Lease, TransferDock
from rlkit.dock.heartbeat import keep_alive
from rlkit.dock.messages import Peers, StaleLeaseError
from rlkit.dock.traffic import GRPO, Graph, Size, Stage, predicted_traffic
from rlkit.dock.transport import LocalTransport

__all__ = [
    "GRPO",
    "CentralDock",
    "Graph",
    "Lease",
    "LocalTransport",
    "Peers",
    "Size",
    "Stage",
    "StaleLeaseError",
    "TransferDock",
    "keep_alive",
    "predicted_traffic",
]
