"""The cluster on Ray: worker processes, a store a node, a process for the user's functions."""

import gc
import logging
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit import device as devices
from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.base import Cluster
from rlkit.cluster.calls import check_arguments, default_name, num_workers
from rlkit.cluster.connect import connect
from rlkit.cluster.dock import RayDockTransport, drop_in_background
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.host import Runner
from rlkit.cluster.relay import LineRelay, install
from rlkit.cluster.store import RayStore, start_store
from rlkit.cluster.transport import GroupSpec, RayTransport
from rlkit.cluster.watch import HeadWatch, Reaper
from rlkit.config import Layout
from rlkit.dock import TransferDock
from rlkit.shield import when_collected

logger = logging.getLogger("rlkit.cluster")


class RayCluster(Cluster):
    """Worker processes on Ray, by ``rk.launch()``. Leaving it shuts down what it started."""

    def __init__(
        self,
        *,
        device: str,
        num_devices: int,
        seed: int,
        address: str | None,
        threads: int,
        timeout_s: float,
    ) -> None:
        self.device, self.num_devices, self.seed = device, num_devices, seed
        self.threads, self.timeout_s, self._id = threads, timeout_s, uuid.uuid4().hex[:8]
        # A group that nobody names any more ends its processes and frees its devices.
        self.groups = weakref.WeakValueDictionary[str, WorkerGroup]()
        self._transports: list[RayTransport] = []
        self._docks: weakref.WeakSet[RayDockTransport] = weakref.WeakSet()
        self.lost, self.open = False, True
        ray, self.started, self._connected = connect(device, num_devices, address=address)
        if not self.started:  # as many as the cluster has, on all its nodes
            resource = devices.platform(device).ray_resource
            self.num_devices = int(ray.cluster_resources().get(resource, 0))
        try:
            self._open(ray)
        except BaseException:
            self.open = False
            if self._connected:
                ray.shutdown()
            raise

    def _open(self, ray: Any) -> None:
        """Guards, stores and the process for functions of the user."""
        self.relay = LineRelay()
        install(self.relay)
        head = ray.get_runtime_context().gcs_address
        self._watch = HeadWatch(head, self._on_lost)
        self.session = Path(ray._private.worker._global_node.get_session_dir_path()).name
        self._reaper = Reaper(self.session) if self.started else None
        self.store = RayStore(self._start_stores(), timeout_s=self.timeout_s)
        self.store.run = self._run_beside
        self._runner = RayTransport(self, GroupSpec(cls=Runner, name="runner", takes_device=False))
        self._runner.begin()  # starts while the caller goes on

    def _on_lost(self) -> None:
        """The head is gone: disconnect before Ray ends this process for it."""
        import ray

        self.lost, self.open = True, False
        ray.shutdown()
        if self._reaper is not None:
            self._reaper.close()

    def _store_name(self, node: str) -> str:
        """Under which a process that starts again finds a node's store."""
        return f"store-{self._id}-{node}"

    def _start_stores(self) -> dict[str, Any]:
        import ray

        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return {node: start_store(node, self._store_name(node), at=node) for node in alive}

    def _replace_store(self, node: str) -> Any:
        """An empty store in place of one whose node is lost, under its name, on this node."""
        import ray

        ray.kill(self.store.actors[node])
        here, deadline = ray.get_runtime_context().get_node_id(), time.time() + 30
        while True:
            try:
                self.store.actors[node] = start_store(node, self._store_name(node), at=here)
                return self.store.actors[node]
            except ValueError:  # the name is taken until the old one is gone
                if time.time() > deadline:
                    raise
                time.sleep(0.1)

    def spawn(
        self,
        cls: type,
        *args: Any,
        n: int | None = None,
        layout: Layout | None = None,
        colocate_with: WorkerGroup | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        """``n`` data-parallel workers of ``cls(*args, **kwargs)``, a device each.

        With ``colocate_with`` they share that group's devices, and ``n`` is its size. A ``layout``
        says how they share a model: ``n`` follows from it, or gives it its dp. Classes and
        functions travel by value.
        """
        self._check_open("spawn")
        if not isinstance(cls, type):
            raise TypeError(f"spawn: got {cls!r}, need a worker class.")
        check_arguments(cls, args, kwargs)
        n = num_workers(n, layout, colocate_with)
        free = self.num_devices - self.num_devices_in_use
        if colocate_with is None and n > free:
            gc.collect()  # an old traceback may hold a group that has no name any more
            free = self.num_devices - self.num_devices_in_use
        if colocate_with is None and n > free:
            raise ValueError(
                f"spawn: {n} more workers need {n} devices; {free} of {self.num_devices} are free. "
                f"Groups that hold devices: {sorted(self.groups)}; del a group you need no more, "
                "or use colocate_with=, fewer workers, rk.launch(num_devices=...)."
            )
        if colocate_with is not None and len(colocate_with) != n:
            raise ValueError(
                f"spawn: got n={n} on {len(colocate_with)} colocated workers, need equally many."
            )
        name = name or default_name(cls, list(self.groups))
        if name in self.groups:
            gc.collect()
        if name in self.groups:
            raise ValueError(f"spawn: a group named {name!r} exists; need another name.")
        spec = GroupSpec(
            cls=cls, args=args, kwargs=kwargs, name=name, n=n, beside=colocate_with,
            layout=layout and layout.on(n),
        )  # fmt: skip
        transport = RayTransport(self, spec)
        transport.build()
        group = WorkerGroup(cls, name, n, transport=transport, store=self.store)
        self.groups[name] = group
        self._transports.append(transport)
        when_collected(group, _end, transport, self._transports)
        return group

    def _dock_transport(self, **options: Any) -> RayDockTransport:
        names = {node: self._store_name(node) for node in self.store.actors}
        transport = RayDockTransport(self.store, names, timeout_s=self.timeout_s, **options)
        transport.replace = self._replace_store
        self._docks.add(transport)
        return transport

    def _drop_leases(self, holders: Sequence[str]) -> None:
        """Workers are gone: what they hold of docks is offered again, at once."""
        for transport in list(self._docks):
            drop_in_background(TransferDock(transport), holders)

    def _run_beside(self, call: Any, batch: Batch, name: str) -> Any:
        """Run ``call(batch)`` in the process for functions of the user, and wait for it."""
        self._check_open(name)
        if self._runner.pipeline.stuck:  # it has no state: a new one replaces it
            logger.warning("the process for functions of the user is stuck or dead: a new one")
            self._runner.kill()
            self._runner.begin()
            self._runner.facts = []
        if not self._runner.facts:
            self._runner.wait()
        group = WorkerGroup(Runner, "runner", 1, transport=self._runner, store=self.store)
        try:
            with trace.labelled(trace.label(name)):
                return group.run(call, batch, name)
        except RuntimeError:
            if not self._runner.pipeline.lost:
                raise
            raise RuntimeError(
                f"{getattr(call, 'what', name)} ended the process for functions of the user: "
                f"{self._runner.pipeline.lost}. Call it again: a new process starts, and nothing "
                "else is lost. A reward that may do so belongs into rk.rewards.Killable(fn)."
            ) from None

    def shutdown(self) -> None:
        """End the workers and stores, and Ray itself if this cluster started it.

        Twice is no error.
        """
        if not self.open:
            return
        self.open = False
        self._watch.stop()
        import ray

        if ray.is_initialized():  # else Ray is gone already, and its calls would start a new one
            for transport in [self._runner, *self._transports]:
                transport.kill()
            for actor in self.store.actors.values():
                ray.kill(actor)
            if self._connected:
                ray.shutdown()
        self._transports.clear()
        self.store.actors.clear()
        self.groups.clear()
        self.relay.flush()
        if self._reaper is not None:
            self._reaper.close()

    @property
    def num_devices_in_use(self) -> int:
        """Devices that workers occupy; colocated workers share."""
        return sum(t.n for t in self._transports if t.owns)

    def _check_open(self, what: str) -> None:
        if self.lost:
            raise ConnectionError(
                "cluster lost: its head process ended, and the workers with it. rk.launch() starts "
                "a new cluster; load a checkpoint to go on."
            )
        super()._check_open(what)

    def __repr__(self) -> str:
        closed = "cluster lost" if self.lost else "shut down"
        state = f"{len(self.groups)} groups" if self.open else closed
        return f"RayCluster({self.num_devices} x {self.device}, {state})"


def _end(transport: RayTransport, transports: list[RayTransport]) -> None:
    """Finalizer of a group."""
    if transport in transports:
        transports.remove(transport)
        transport.kill()
