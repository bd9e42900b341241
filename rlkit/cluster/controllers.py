"""The process of a node that has controllers of a dock."""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlkit.dock.controller import Controller
from rlkit.dock.transport import ledger_node
from rlkit.functions import Shipped

logger = logging.getLogger("rlkit.dock")


class ControllerActor:
    """The controllers of a dock that sit on one node; a restarted one knows what the warehouses
    and the ledgers know.
    """

    def __init__(
        self, dock: str, warehouses: Mapping[str, str], *, timeout_s: float, lease_s: float
    ) -> None:
        """``warehouses``: node id -> name of its store actor."""
        import ray

        self.dock, self.names = dock, dict(warehouses)
        self.warehouses = {node: ray.get_actor(name) for node, name in warehouses.items()}
        self.timeout_s, self.lease_s = timeout_s, lease_s
        self._controllers: dict[str, Controller] = {}
        self._lock = threading.Lock()

    def open(self, stage: str, capacity: int | None) -> None:
        """Make a stage's controller unless it is there."""
        with self._lock:
            if stage in self._controllers:
                return
            keeper = [ledger_node(stage, tuple(self.warehouses))]
            controller = Controller(
                stage,
                capacity=capacity,
                lease_s=self.lease_s,
                commit=lambda token, held: self._ask(keeper, "commit", stage, token, held),
            )
            found = self._ask(tuple(self.warehouses), "index", stage)
            ledger = self._ask(keeper, "ledger", stage)[0] or {"leases": {}, "last": 0}
            notices = [notice for each in found for notice in each or ()]
            controller.restore(notices, ledger, leased=True)
            self._controllers[stage] = controller

    def _ask(self, nodes: Sequence[str], method: str, *args: Any) -> list[Any]:
        """A method of some nodes' warehouses; None where a warehouse is lost."""
        import ray
        from ray import exceptions

        def send(node: str) -> Any:
            return self.warehouses[node].of_dock.remote(self.dock, method, args, {})

        gone = (LookupError, exceptions.RayActorError, exceptions.ActorUnschedulableError)
        found = []
        for node, ref in [(node, send(node)) for node in nodes]:
            try:
                found.append(ray.get(ref, timeout=self.timeout_s))
            except gone as error:
                old = self.warehouses[node]
                self.warehouses[node] = newest(self.names[node], old)
                if self.warehouses[node] != old:  # its node was lost: it is elsewhere now
                    found.append(ray.get(send(node), timeout=self.timeout_s))
                    continue
                logger.error("%s: node %s has no warehouse (%s)", self.dock, node[:8], error)
                found.append(None)
        return found

    def call(
        self, stage: str, capacity: int | None, method: str, args: Any, options: Mapping[str, Any]
    ) -> Any:
        """A method of a stage's controller."""
        self.open(stage, capacity)
        return getattr(self._controllers[stage], method)(*map(_loaded, args), **options)

    def pid_of(self) -> int:
        """This process's id."""
        return os.getpid()


def newest(name: str, known: Any) -> Any:
    """The actor that has a name now; the known one if none has."""
    import ray

    try:
        found = ray.get_actor(name)
    except ValueError:
        return known
    return known if found._actor_id == known._actor_id else found


def _loaded(value: Any) -> Any:
    sampler = getattr(value, "sampler", None)
    return replace(value, sampler=sampler.load()) if isinstance(sampler, Shipped) else value
