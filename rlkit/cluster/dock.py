"""The dock on Ray: stages' controllers in a process a node, and the nodes' store actors as
warehouses.

Only metadata goes to controllers and to the driver; values go from a process to its own node's
warehouse, and from there straight to who asks.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from rlkit.cluster.controllers import ControllerActor, newest
from rlkit.cluster.shared import opened, shared
from rlkit.dock import Graph, TransferDock, samplers
from rlkit.dock.messages import ClosedError, Request
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Reply, check_options, ledger_node
from rlkit.functions import ship
from rlkit.shield import when_collected

logger = logging.getLogger("rlkit.dock")

AWAY_S = 30.0
"""How long an actor that died may take to start again."""
WAITING = 128
"""Calls that may wait in one node's controllers at a time."""


class NodeLostError(LookupError):
    """A node is gone, and the rows that lay there."""


class RayDockTransport:
    """Calls of controllers and warehouses on a cluster; travels to workers."""

    sends = True

    def __init__(
        self,
        store: Any,
        names: Mapping[str, str],
        *,
        graph: Graph | None = None,
        capacity: int | None = None,
        lease_s: float = 60.0,
        timeout_s: float = 600.0,
    ) -> None:
        """``store`` is the cluster's, ``names`` those of its actors by node. ``capacity``: rows
        that may wait for each stage of the graph.
        """
        check_options(graph=graph, capacity=capacity, lease_s=lease_s)
        self.name = f"dock-{uuid.uuid4().hex[:8]}"
        self.nodes, self.graph, self.capacity = tuple(store.actors), graph, capacity
        self.store, self.timeout_s, self._closed = store, timeout_s, False
        self._consumers = graph.consumers if graph else ()
        self._stages = dict.fromkeys((DRIVER, *self._consumers))
        self._warehouses, self._names = dict(store.actors), dict(names)
        self.replace: Callable[[str], Any] | None = None
        """On the driver: starts a store anew whose node is lost."""
        self.warehouses("make", dict.fromkeys(self.nodes, self._consumers))
        # By name: handles of actors as arguments would keep the process from starting again.
        self._actors = {node: self._start(node, names, lease_s) for node in self.nodes}
        self.controllers("consumed", dict.fromkeys(self._stages, ()))  # all of them are there
        when_collected(self, _close, self.name, self._warehouses, self._actors)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"store": None, "replace": None}

    def _start(self, node: str, names: Mapping[str, str], lease_s: float) -> Any:
        """The controllers' process on one node; on another one if that node is lost."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor: Any = ray.remote(ControllerActor)
        return actor.options(
            num_cpus=0, max_concurrency=WAITING, max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        ).remote(
            self.name, dict(names), timeout_s=self.timeout_s, lease_s=lease_s
        )  # fmt: skip

    @property
    def here(self) -> str:
        """The node of this process, or one that has a warehouse."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return node if node in self._warehouses else self.nodes[0]

    def open(self, stage: str) -> None:
        """Know a stage: its controller starts with the first call to it."""
        self._stages[stage] = None

    def _of(self, stage: str) -> Any:
        """The process that has a stage's controller: beside another node's ledger if it can be."""
        keeper = self.nodes.index(ledger_node(stage, self.nodes))
        return self._actors[self.nodes[(keeper + 1) % len(self.nodes)]]

    def renew(self, node: str) -> None:
        """Start a node's warehouse, empty, if its process died; elsewhere, if the node is lost."""
        try:
            self.warehouses("make", {node: self._consumers})
        except NodeLostError:
            if self.replace is None:
                raise
            self._warehouses[node] = self.replace(node)
            self.warehouses("make", {node: self._consumers})

    def stages(self) -> Sequence[str]:
        """Stages that have a controller, those that other processes opened among them."""
        with suppress(LookupError):
            for reply in self.warehouses("stages", dict.fromkeys(self.nodes, ())).values():
                self._stages |= dict.fromkeys(reply.value)
        return tuple(self._stages)

    def controllers(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the controllers of some stages at once; stage -> reply."""
        for stage in calls:
            self.open(stage)
        sent = {stage: tuple(map(_sendable, args)) for stage, args in calls.items()}

        def send(stage: str) -> Any:
            capacity = None if stage == DRIVER else self.capacity
            return self._of(stage).call.remote(stage, capacity, method, sent[stage], options)

        return self._every(send, sent, method, options)

    def warehouses(
        self, method: str, calls: Mapping[str, tuple[Any, ...]], **options: Any
    ) -> dict[str, Reply]:
        """Call ``method`` of the warehouses of some nodes at once; node -> reply."""
        start = time.perf_counter()
        sent = {node: [shared(x) for x in args] for node, args in calls.items()}

        def send(node: str, *, by_value: bool = False) -> Any:
            called = self._warehouses[node].of_dock
            return called.remote(self.name, method, sent[node], options, by_value=by_value)

        try:
            found = self._every(send, calls, method, options)
        except NodeLostError:
            if not self._found_again():
                raise
            found = self._every(send, calls, method, options)
        for node, reply in found.items():
            again = partial(send, node, by_value=True)
            value = _opened(reply.value, again, f"{node}: {method}", self.timeout_s)
            if value is not reply.value:
                found[node] = Reply(value, time.perf_counter() - start)
        return found

    def tell(self, method: str, calls: Mapping[str, tuple[Any, ...]]) -> None:
        """Call ``method`` of the warehouses of some nodes, and wait for nothing."""
        self._check_open(method)
        for node, args in calls.items():
            self._warehouses[node].of_dock.remote(self.name, method, args, {})

    def _every(
        self, send: Callable[[str], Any], names: Iterable[str], method: str, options: Any
    ) -> dict[str, Reply]:
        """Send to all, then wait for each; seconds are until its own answer."""
        self._check_open(method)
        start = time.perf_counter()
        limit = self.timeout_s + options.get("timeout_s", 0.0)
        try:
            refs = {name: send(name) for name in names}
        except TypeError as error:  # Ray's says all of the arguments
            raise TypeError(
                f"dock: {method} got values that can't be pickled; need tensors, arrays, numbers, "
                "text or plain objects."
            ) from error
        found = {}
        for name, ref in refs.items():
            again = lambda n=name: (self._found_again(), send(n))[1]
            value = _answer(ref, again, f"{name}: {method}", limit)
            found[name] = Reply(value, time.perf_counter() - start)
        return found

    def _found_again(self) -> bool:
        """Look up the warehouses by name; whether one is another actor now."""
        before = dict(self._warehouses)
        self._warehouses |= {node: newest(self._names[node], old) for node, old in before.items()}
        return self._warehouses != before

    def _check_open(self, method: str) -> None:
        import ray

        shut = self.store is not None and not self.store.actors
        if self._closed or shut or not ray.is_initialized():  # else the call would start a new Ray
            raise ClosedError(
                f"dock: {method} came after the dock was closed, or its cluster shut down; its "
                "rows are gone. Make another one with cluster.dock()."
            )

    def close(self) -> None:
        """End the controllers, and forget the rows."""
        self._closed = True
        _close(self.name, self._warehouses, self._actors)


def drop_in_background(dock: TransferDock, holders: Sequence[str]) -> None:
    """Offer the leased rows of dead holders again, without making the caller wait."""

    def drop() -> None:
        for holder in holders:
            try:
                dock.drop(holder)
            except (RuntimeError, TimeoutError, LookupError) as error:  # leases run out by time
                logger.warning("leases of %s: %s", holder, error)

    threading.Thread(target=drop, daemon=True, name="rlkit-dock-drop").start()


def _close(name: str, warehouses: Mapping[str, Any], actors: dict[str, Any]) -> None:
    import ray

    if ray.is_initialized():
        for warehouse in warehouses.values():
            warehouse.of_dock.remote(name, "close", (), {})
        for actor in actors.values():
            ray.kill(actor)
    actors.clear()


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
        except exceptions.ActorUnschedulableError:
            raise NodeLostError(
                f"dock: {what} failed: that node is lost, and its rows with it. Call "
                "dock.lost(node) on the driver: it returns the uids of rows to make again."
            ) from None
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


def _opened(value: Any, again: Any, what: str, limit_s: float) -> Any:
    """An answer with its rows; by value if the process that wrote them is gone."""
    from ray.exceptions import ObjectLostError

    try:
        return opened(value)
    except ObjectLostError:
        return _answer(again(), again, what, limit_s)


def _sendable(value: Any) -> Any:
    """A request with its sampler by value, if that is not one of rlkit's."""
    if not isinstance(value, Request):
        return value
    fn = getattr(value.sampler, "func", value.sampler)  # of a partial
    known = getattr(fn, "__module__", None) == samplers.__name__
    return value if known else replace(value, sampler=ship(value.sampler))
