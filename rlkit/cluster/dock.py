"""The dock on Ray: a controller actor a stage, and the node's store actor as its warehouse.

Only metadata goes to controllers and to the driver; values go from a process to its own node's
warehouse, and from there straight to who asks.
"""

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlkit.dock import Graph
from rlkit.dock.controller import Controller
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Reply, ledger_node
from rlkit.functions import Shipped, ship

AWAY_S = 30.0
"""How long an actor that died may take to start again."""
WAITING = 64
"""Calls that may wait in one controller at a time."""


class ControllerActor:
    """One stage's controller. A restarted one knows what the warehouses and the ledger know."""

    def __init__(
        self,
        stage: str,
        dock: str,
        warehouses: Mapping[str, Any],
        *,
        timeout_s: float,
        **limits: Any,
    ) -> None:
        """``limits``: ``capacity`` and ``lease_s`` of the controller."""
        self.dock, self.timeout_s = dock, timeout_s
        keeper = warehouses[ledger_node(stage, tuple(warehouses))]
        self.controller = Controller(
            stage,
            commit=lambda token, held: self._ask([keeper], "commit", stage, token, held),
            **limits,
        )
        found = self._ask(list(warehouses.values()), "index", stage)
        notices = [notice for each in found for notice in each]
        (ledger,) = self._ask([keeper], "ledger", stage)
        self.controller.restore(notices, ledger, leased=True)

    def _ask(self, warehouses: Sequence[Any], method: str, *args: Any) -> list[Any]:
        import ray

        refs = [place.of_dock.remote(self.dock, method, args, {}) for place in warehouses]
        return ray.get(refs, timeout=self.timeout_s)

    def call(self, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """A method of the controller."""
        return getattr(self.controller, method)(*map(_loaded, args), **options)

    def pid_of(self) -> int:
        """This process's id."""
        return os.getpid()


class RayDockTransport:
    """Calls of controllers and warehouses on a cluster; travels to workers."""

    def __init__(
        self,
        warehouses: Mapping[str, Any],
        *,
        graph: Graph | None = None,
        capacity: int | None = None,
        lease_s: float = 60.0,
        timeout_s: float = 600.0,
    ) -> None:
        """``warehouses``: node id -> store actor. ``capacity``: rows that may wait for each stage
        of the graph.
        """
        if capacity is not None and graph is None:
            raise ValueError(
                f"capacity: got {capacity} without a graph, need one: rows wait for its stages. "
                "Pass graph=, such as rlkit.dock.GRPO."
            )
        self.name = f"dock-{uuid.uuid4().hex[:8]}"
        self.nodes, self.graph, self.capacity = tuple(warehouses), graph, capacity
        self.lease_s, self.timeout_s = lease_s, timeout_s
        self._warehouses, self._actors = dict(warehouses), {}
        self._owner = True
        self._consumers = graph.consumers if graph else ()
        self.warehouses("make", dict.fromkeys(self.nodes, self._consumers))
        for stage in (DRIVER, *self._consumers):
            self.open(stage)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owner": False}

    @property
    def here(self) -> str:
        """The node of this process, or one that has a warehouse."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node if node in self._warehouses else self.nodes[0]

    def open(self, stage: str) -> None:
        """Start a stage's controller unless it runs; workers find those the driver has opened."""
        import ray

        if stage in self._actors:
            return
        if not self._owner:
            try:
                self._actors[stage] = ray.get_actor(f"{self.name}/{stage}")
                return
            except ValueError:
                raise KeyError(
                    f"stage {stage!r}: got a stage without a controller, need it in the dock's "
                    f"graph, or opened by the driver: dock.transport.open({stage!r})."
                ) from None
        actor: Any = ray.remote(ControllerActor)
        self._actors[stage] = actor.options(
            name=f"{self.name}/{stage}", num_cpus=0, max_concurrency=WAITING, max_restarts=-1
        ).remote(
            stage,
            self.name,
            self._warehouses,
            timeout_s=self.timeout_s,
            capacity=None if stage == DRIVER else self.capacity,
            lease_s=self.lease_s,
        )

    def renew(self, node: str) -> None:
        """Start a node's warehouse, empty, if its process died."""
        self.warehouses("make", {node: self._consumers})

    def stages(self) -> Sequence[str]:
        """Stages that have a controller."""
        return tuple(self._actors)

    def controllers(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the controllers of some stages at once; stage -> reply."""
        for stage in calls:
            self.open(stage)
        sent = {stage: tuple(map(_sendable, args)) for stage, args in calls.items()}
        return self._every(self._actors, method, sent, options)

    def warehouses(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the warehouses of some nodes at once; node -> reply."""
        return self._every(self._warehouses, method, calls, options)

    def _every(
        self, actors: Mapping[str, Any], method: str, calls: Mapping[str, Any], options: Any
    ) -> dict[str, Reply]:
        start = time.perf_counter()
        limit = self.timeout_s + options.get("timeout_s", 0.0)
        send = self._to_warehouse if actors is self._warehouses else self._to_controller
        refs = {name: send(actors[name], method, args, options) for name, args in calls.items()}
        found = {}
        for name, ref in refs.items():
            again = lambda n=name: send(actors[n], method, calls[n], options)
            value = _answer(ref, again, f"{name}: {method}", limit)
            found[name] = Reply(value, time.perf_counter() - start)
        return found

    def _to_warehouse(self, actor: Any, method: str, args: Any, options: Any) -> Any:
        return actor.of_dock.remote(self.name, method, args, options)

    def _to_controller(self, actor: Any, method: str, args: Any, options: Any) -> Any:
        return actor.call.remote(method, args, options)

    def close(self) -> None:
        """End the controllers, and forget the rows."""
        import ray

        self.warehouses("close", dict.fromkeys(self.nodes, ()))
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()


def _answer(ref: Any, again: Any, what: str, limit_s: float) -> Any:
    """A call's result; a call of an actor that is starting again is repeated."""
    import ray
    from ray import exceptions

    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return ray.get(ref, timeout=limit_s)
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except exceptions.GetTimeoutError as error:
            raise TimeoutError(
                f"dock: {what} took over {limit_s:.0f} s; its process is overloaded or gone. Raise "
                "the dock's timeout_s, or look at cluster.frame()."
            ) from error
        except exceptions.RayActorError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"dock: {what} failed: its process died and did not start again within "
                    f"{AWAY_S:.0f} s ({str(error).splitlines()[0]})."
                ) from error
            time.sleep(0.1)
            ref = again()


def _sendable(value: Any) -> Any:
    """A request with its sampler by value."""
    sampler = getattr(value, "sampler", None)
    return value if sampler is None else replace(value, sampler=ship(sampler))


def _loaded(value: Any) -> Any:
    sampler = getattr(value, "sampler", None)
    return replace(value, sampler=sampler.load()) if isinstance(sampler, Shipped) else value
