"""What both clusters share: groups by name, docks, tables, an end."""

from collections.abc import MutableMapping
from typing import Any, Self

from rlkit.cluster.group import WorkerGroup
from rlkit.dock import CentralDock, Graph, TransferDock
from rlkit.html import table


class Cluster:
    """Groups of workers by name; leaving it as a context manager shuts it down."""

    groups: MutableMapping[str, WorkerGroup]
    open: bool

    def dock(
        self,
        *,
        graph: Graph | None = None,
        capacity: int | None = None,
        lease_s: float = 60.0,
        timeout_s: float = 60.0,
        central: bool = False,
    ) -> TransferDock:
        """A transfer dock: a warehouse a node, a controller a stage. Hand it to workers in a call.

        capacity: rows that may wait for each stage of the graph. lease_s: how long a holder that
        gives no heartbeat keeps its rows. central: all rows on one node, to compare with.
        """
        self._check_open("dock")
        transport = self._dock_transport(graph=graph, capacity=capacity, lease_s=lease_s)
        return (CentralDock if central else TransferDock)(transport, timeout_s=timeout_s)

    def _dock_transport(self, *, graph: Graph | None, capacity: int | None, lease_s: float) -> Any:
        raise NotImplementedError

    def respawn(self, group: WorkerGroup) -> None:
        """New workers for the group, from the class as it is now; their state is lost."""
        self._check_open("respawn")
        group._transport.respawn()

    def shutdown(self) -> None:
        """End the workers."""
        raise NotImplementedError

    def frame(self) -> Any:
        """DataFrame, a row a worker: group, class, device, node, process id."""
        import pandas as pd

        return pd.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [row for group in self.groups.values() for row in group._describe()]

    def _check_open(self, what: str) -> None:
        if not self.open:
            raise RuntimeError(
                f"{what}: the cluster was shut down; launch a new one with rk.launch()."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _repr_html_(self) -> str:
        return table(repr(self), self._rows())
