"""The seam between the dock's client and where its parts run; here: all in this process."""

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlkit.checks import finite, whole
from rlkit.dock.controller import Controller
from rlkit.dock.traffic import DRIVER, Graph
from rlkit.dock.warehouse import Warehouse


@dataclass(frozen=True, slots=True)
class Reply:
    """What a remote method returned, and the seconds until it did."""

    value: Any
    seconds: float


class Transport(Protocol):
    """Calls of controllers by stage and of warehouses by node."""

    nodes: tuple[str, ...]
    graph: Graph | None
    capacity: int | None
    """Rows that may wait for each consumer of the graph."""
    store: Any
    """The cluster's row store on its driver, which handles values by name; else None."""
    sends: bool
    """Whether what is put is copied on its way, not kept as it is."""

    @property
    def here(self) -> str:
        """The node of this process."""
        ...

    def open(self, stage: str) -> None:
        """Start a stage's controller unless it runs."""
        ...

    def renew(self, node: str) -> None:
        """Start a node's warehouse, empty, if it was lost."""
        ...

    def stages(self) -> Sequence[str]:
        """Stages that have a controller."""
        ...

    def controllers(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the controllers of some stages at once; stage -> reply."""
        ...

    def warehouses(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the warehouses of some nodes at once; node -> reply."""
        ...

    def tell(self, method: str, calls: Mapping[str, tuple[Any, ...]]) -> None:
        """Call ``method`` of the warehouses of some nodes, and wait for nothing."""
        ...


def ledger_node(stage: str, nodes: Sequence[str]) -> str:
    """The node whose warehouse keeps a stage's ledger: the same in every process."""
    return nodes[zlib.crc32(stage.encode()) % len(nodes)]


def check_options(*, graph: Graph | None, capacity: int | None, lease_s: float) -> None:
    """Errors of a dock's options."""
    if not (graph is None or isinstance(graph, Graph)):
        raise TypeError(f"graph: got {graph!r}, need a rk.dock.Graph, such as rk.dock.GRPO.")
    if finite("lease_s", lease_s) == 0:
        raise ValueError("lease_s: got 0, need seconds above 0: a lease would end as it begins.")
    if capacity is not None and graph is None:
        raise ValueError(
            f"capacity: got {capacity} without a graph, need one: rows wait for its stages. "
            "Pass graph=, such as rlkit.dock.GRPO."
        )
    if capacity is not None:
        whole("capacity", capacity, what="row")


class LocalTransport:
    """Controllers and warehouses in the memory of this process."""

    store, sends = None, False

    def __init__(
        self,
        nodes: Sequence[str] = ("node0",),
        *,
        graph: Graph | None = None,
        capacity: int | None = None,
        lease_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``capacity``: rows that may wait for each consumer of the graph."""
        check_options(graph=graph, capacity=capacity, lease_s=lease_s)
        named = isinstance(nodes, list | tuple) and all(isinstance(node, str) for node in nodes)
        if not (named and nodes and len(set(nodes)) == len(nodes)):
            raise ValueError(f"nodes: got {nodes!r}, need names in a list, one or more, each once.")
        consumers = graph.consumers if graph else ()
        self.nodes, self.graph, self.here = tuple(nodes), graph, nodes[0]
        self._options: dict[str, Any] = {"lease_s": lease_s, "clock": clock}
        self.capacity = capacity
        self._warehouses = {node: Warehouse(node, consumers=consumers) for node in nodes}
        self._controllers: dict[str, Controller] = {}
        self._lock = threading.RLock()
        for stage in (DRIVER, *consumers):
            self.open(stage)

    def open(self, stage: str) -> None:
        """Start a stage's controller from the warehouses' notices and its ledger."""
        with self._lock:
            if stage in self._controllers:
                return
            keeper = ledger_node(stage, self.nodes)
            controller = Controller(
                stage,
                capacity=None if stage == DRIVER else self.capacity,
                commit=lambda token, held: self._warehouses[keeper].commit(stage, token, held),
                **self._options,
            )
            self._controllers[stage] = controller
            notices = [n for place in self._warehouses.values() for n in place.index(stage)]
            controller.restore(notices, self._warehouses[keeper].ledger(stage), leased=True)

    def kill(self, stage: str) -> None:
        """Lose a controller with all it knows, as a crash does, and start another."""
        with self._lock:
            del self._controllers[stage]
            self.open(stage)

    def lose(self, node: str) -> None:
        """Lose a warehouse with all it has, and start an empty one; then call ``dock.lost``."""
        self._warehouses[node] = Warehouse(node, consumers=self._warehouses[node].consumers)

    def renew(self, node: str) -> None:
        """Nothing: ``lose`` has started an empty one."""

    def stages(self) -> Sequence[str]:
        """Stages that have a controller."""
        return tuple(self._controllers)

    def controllers(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the controllers of some stages; stage -> reply."""
        for stage in calls:
            self.open(stage)
        return _each(self._controllers, method, calls, options)

    def warehouses(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the warehouses of some nodes; node -> reply."""
        return _each(self._warehouses, method, calls, options)

    def tell(self, method: str, calls: Mapping[str, tuple[Any, ...]]) -> None:
        """``warehouses`` without an answer."""
        self.warehouses(method, calls)

    def __reduce__(self) -> Any:
        raise TypeError(
            "this dock lives in the memory of one process and can't be sent. Hand rows on with put "
            "and get."
        )


def _each(
    parts: Mapping[str, Any], method: str, calls: Mapping[str, tuple[Any, ...]], options: Any
) -> dict[str, Reply]:
    found = {}
    for name, args in calls.items():
        start = time.perf_counter()
        value = getattr(parts[name], method)(*args, **options)
        found[name] = Reply(value, time.perf_counter() - start)
    return found
