"""The cluster on Ray: worker processes, a store on each node, functions of the user in a process of their own."""

import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlkit import device as devices
from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.calls import Failure, default_name, merge
from rlkit.cluster.group import WorkerGroup, table
from rlkit.cluster.host import Runner, WorkerHost
from rlkit.cluster.store import RayStore, StoreActor
from rlkit.config import Layout
from rlkit.functions import ship

logger = logging.getLogger("rlkit.cluster")


class RayCluster:
    """Worker processes on Ray; made by ``rk.launch()``. A context manager: leaving it shuts down what it started."""

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
        self.threads, self.timeout_s = threads, timeout_s
        self.groups: dict[str, WorkerGroup] = {}
        self.started = self._connect(address)
        self.open = True
        self.store = RayStore(self._start_stores(), timeout_s=timeout_s)
        self.store.run = self._run_beside
        self._runner: WorkerGroup | None = None

    def _connect(self, address: str | None) -> bool:
        """Start Ray here, or join the cluster at ``address``; whether this call started it."""
        ray = import_ray()
        if ray.is_initialized():
            return False
        options: dict[str, Any] = {"logging_level": logging.ERROR, "include_dashboard": False}
        if address is None:
            slots = {devices.platform(self.device).ray_resource: self.num_devices}
            num_cpus = max(self.num_devices, os.cpu_count() or 1) if self.device == "cpu" else None
            options |= {
                "address": "local",
                "num_cpus": num_cpus,
                "object_store_memory": 1 << 30,
                "resources": {k: v for k, v in slots.items() if k not in ("CPU", "GPU")},
            }
            if "GPU" in slots:
                options["num_gpus"] = slots["GPU"]
            os.environ.pop("RAY_ADDRESS", None)  # a stale address must not keep a local start from working
        else:
            options = {"logging_level": logging.ERROR, "address": address}
        ray.init(**options)
        return True

    def _start_stores(self) -> dict[str, Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actors = {}
        for node in ray.nodes():
            if node["Alive"]:
                at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                actors[node["NodeID"]] = (
                    ray.remote(StoreActor)
                    .options(num_cpus=0, max_concurrency=8, scheduling_strategy=at)
                    .remote()
                )
        return actors

    def spawn(
        self,
        cls: type,
        *args: Any,
        n: int = 1,
        layout: Layout | None = None,
        colocate_with: WorkerGroup | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> WorkerGroup:
        """``n`` data-parallel workers of ``cls(*args, **kwargs)``, a device each, or on the devices of ``colocate_with``.

        ``layout`` names the same number by dimension. Classes and functions travel by value.
        """
        self._check_open("spawn")
        n = layout.num_devices if layout is not None else n
        if not isinstance(cls, type):
            raise TypeError(f"spawn: got {cls!r}, need a worker class.")
        if n < 1:
            raise ValueError(f"spawn: got n={n}, need at least 1 worker.")
        taken = sum(len(g) for g in self.groups.values() if not g._transport.shared)
        if colocate_with is None and taken + n > self.num_devices:
            raise ValueError(
                f"spawn: {n} more workers need {n} devices; {self.num_devices - taken} of {self.num_devices} are free. "
                "Use colocate_with=, fewer workers, or rk.launch(num_devices=...)."
            )
        if colocate_with is not None and len(colocate_with) != n:
            raise ValueError(f"spawn: got n={n} on {len(colocate_with)} colocated workers, need equally many.")
        name = name or default_name(cls, list(self.groups))
        if name in self.groups:
            raise ValueError(f"spawn: a group named {name!r} exists; need another name.")
        transport = RayTransport(self, cls, args, kwargs, name=name, n=n, beside=colocate_with)
        transport.build()
        group = WorkerGroup(
            cls, name, n, transport=transport, store=self.store, describe=transport.describe
        )
        self.groups[name] = group
        return group

    def respawn(self, group: WorkerGroup) -> None:
        """New processes for the group, from the class as it is now; the workers' state is lost."""
        self._check_open("respawn")
        group._transport.kill()
        group._transport.build()

    def _run_beside(self, call: Any, batch: Batch, name: str) -> Any:
        if self._runner is None:
            transport = RayTransport(self, Runner, (), {}, name="runner", n=1, beside=None, free=True)
            transport.build()
            self._runner = WorkerGroup(
                Runner, "runner", 1, transport=transport, store=self.store, describe=transport.describe
            )
        with trace.labelled(trace.label(name)):
            return self._runner.run(call, batch, name)

    def shutdown(self) -> None:
        """End the workers and stores, and Ray itself if this cluster started it. Twice is no error."""
        if not self.open:
            return
        self.open = False
        import ray

        if not ray.is_initialized():  # Ray is gone already; its calls would start a new one
            return
        for group in [*self.groups.values(), *([self._runner] if self._runner else [])]:
            group._transport.kill()
        for actor in self.store.actors.values():
            ray.kill(actor)
        self.store.actors.clear()
        self.groups.clear()
        if self.started:
            ray.shutdown()

    @property
    def num_devices_in_use(self) -> int:
        """Devices that workers occupy; colocated workers share."""
        return sum(len(g) for g in self.groups.values() if not g._transport.shared) or 1

    def frame(self) -> Any:
        """DataFrame, a row a worker: group, class, device, node, process id."""
        import pandas as pd

        return pd.DataFrame([row for group in self.groups.values() for row in group._describe()])

    def _check_open(self, what: str) -> None:
        if not self.open:
            raise RuntimeError(f"{what}: the cluster was shut down; call rk.launch() for a new one.")

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = f"{len(self.groups)} groups" if self.open else "shut down"
        return f"RayCluster({self.num_devices} x {self.device}, {state})"

    def _repr_html_(self) -> str:
        return table(repr(self), [row for g in self.groups.values() for row in g._describe()])


class RayTransport:
    """The processes of one group and the calls to them."""

    def __init__(
        self,
        cluster: RayCluster,
        cls: type,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        name: str,
        n: int,
        beside: WorkerGroup | None,
        free: bool = False,
    ) -> None:  # fmt: skip
        self.cluster, self.cls, self.args, self.kwargs = cluster, cls, args, kwargs
        self.name, self.n, self.beside = name, n, beside
        self.shared = beside is not None or free
        self.hosts: list[Any] = []
        self.facts: list[dict[str, Any]] = []

    def build(self) -> None:
        """Start the processes and the workers in them; an error of a worker's constructor is raised here."""
        import ray

        cluster = self.cluster
        host_class = ray.remote(WorkerHost)
        self.hosts = [
            host_class.options(**self._options(rank)).remote(f"{self.name}/{rank}", threads=cluster.threads)
            for rank in range(self.n)
        ]
        peers: list[Any] = [None] * self.n
        if self.n > 1:
            host, port = self._get([self.hosts[0].meet.remote(cluster.timeout_s)], "starting")[0]
            common = {"host": host, "port": port, "size": self.n, "device": cluster.device}
            common |= {"name": f"{self.name}-{uuid.uuid4().hex[:6]}", "timeout_s": cluster.timeout_s}
            peers = [common | {"rank": rank} for rank in range(self.n)]
        payload = ray.put((ship(self.cls), self.args, self.kwargs))
        refs = [
            host.build.remote(payload, self._facts(rank), peers[rank]) for rank, host in enumerate(self.hosts)
        ]
        answers = self._get(refs, "starting")
        failed = [answer for answer in answers if isinstance(answer, Failure)]
        if failed:
            self.kill()
            failed[0].throw()
        self.facts = [
            {"worker": f"{self.name}/{rank}", "class": self.cls.__name__, "device": cluster.device} | answer
            for rank, answer in enumerate(answers)
        ]

    def _options(self, rank: int) -> dict[str, Any]:
        """Ray options of one worker: its device, or the node of the worker it sits beside."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resource = devices.platform(self.cluster.device).ray_resource
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": 0}
        if self.beside is not None:
            node = self.beside._transport.facts[rank]["node_id"]
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        elif not self.shared and resource == "GPU":
            options["num_gpus"] = 1
        elif not self.shared and resource != "CPU":
            options["resources"] = {resource: 1}
        return options

    def _facts(self, rank: int) -> dict[str, Any]:
        return {
            "name": self.name,
            "dp_rank": rank,
            "dp_size": self.n,
            "device": self.cluster.device,
            "seed": self.cluster.seed,
            "timeout_s": self.cluster.timeout_s,
        }

    def start(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Any:
        """Begin a call on all ranks."""
        import ray

        self.cluster._check_open(f"{self.name}.{method}")
        payload = ray.put((args, kwargs))
        refs = [host.call.remote(method, payload, stage, call) for host in self.hosts]
        return method, refs

    def finish(self, ticket: Any, batch: Batch | None, timeout_s: float | None) -> Any:
        """Wait for all ranks; the merged result, owned by this process."""
        method, refs = ticket
        answers = self._get(refs, method, timeout_s)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            failures[0].throw()
        for _, span in answers:
            trace.current().add(replace(span, devices=self.cluster.num_devices_in_use))
        return merge([adopt(result, self.cluster.store) for result, _ in answers], batch)

    @property
    def processes(self) -> tuple[Any, ...]:
        """What tells these processes from those of a respawned group."""
        return tuple((row["node_id"], row["pid"]) for row in self.facts)

    def done(self, ticket: Any) -> bool:
        """Whether all ranks have answered."""
        import ray

        _, refs = ticket
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def _get(self, refs: list[Any], what: str, timeout_s: float | None = None) -> list[Any]:
        """Answers of all ranks, or the first error, naming the worker."""
        import ray

        limit = self.cluster.timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(refs, timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            ready, running = ray.wait(refs, num_returns=len(refs), timeout=0)
            names = [f"{self.name}/{i}" for i, ref in enumerate(refs) if ref in running]
            raise TimeoutError(
                f"{self.name}.{what}: {', '.join(names)} did not answer within {limit:.0f} s. It may still run: wait with "
                "future.result(timeout_s=...), raise rk.launch(timeout_s=...), or cluster.respawn(group)."
            ) from error
        except ray.exceptions.RayActorError as error:
            dead = self._dead(refs)
            raise RuntimeError(
                f"{self.name}.{what}: worker {', '.join(dead) or self.name} died ({str(error).splitlines()[0]}). "
                "Its state is lost; cluster.respawn(group) starts it again."
            ) from error

    def _dead(self, refs: list[Any]) -> list[str]:
        import ray

        dead = []
        for rank, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.RayActorError:
                dead.append(f"{self.name}/{rank}")
            except Exception:
                continue
        return dead

    def kill(self) -> None:
        """End the processes."""
        import ray

        for host in self.hosts:
            ray.kill(host)
        self.hosts = []

    def describe(self) -> list[dict[str, Any]]:
        """Facts of each worker, known since it started."""
        return [{key: value for key, value in row.items() if key != "node_id"} for row in self.facts]


def adopt(result: Any, store: RayStore) -> Any:
    """Take over rows that a worker wrote: this process frees them when it names them no more."""
    from rlkit.store import Column

    columns = list(result.columns.values()) if isinstance(result, Batch) else [result]
    for column in columns:
        if isinstance(column, Column):
            column.store = store
            for part in column.parts:
                store.adopt(part)
    if isinstance(result, Batch):
        result.store = store
    return result


def import_ray() -> Any:
    """Ray, imported with its noise turned off."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)
    import ray

    return ray
