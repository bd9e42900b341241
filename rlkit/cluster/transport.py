"""The processes of one group on Ray, and the calls to them."""

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlkit import device as devices
from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster.calls import Failure, merge
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.host import WorkerHost
from rlkit.cluster.store import RayStore
from rlkit.functions import ship
from rlkit.store import Column
from rlkit.workers.context import Rendezvous, WorkerContext

if TYPE_CHECKING:
    from rlkit.cluster.ray_cluster import RayCluster


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """What a group is made of; kept, so that it can be made again."""

    cls: type
    """Worker class."""
    args: tuple[Any, ...] = ()
    """Arguments of its constructor."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""
    name: str
    """Group name."""
    n: int = 1
    """Workers."""
    beside: WorkerGroup | None = None
    """Group whose devices it shares."""
    takes_device: bool = True
    """Whether each worker occupies a device of its own."""


class RayTransport:
    """The processes of one group and the calls to them."""

    def __init__(self, cluster: "RayCluster", spec: GroupSpec) -> None:
        self.cluster, self.spec, self.name, self.n = cluster, spec, spec.name, spec.n
        self.shared = spec.beside is not None or not spec.takes_device
        self.hosts: list[Any] = []
        self.building: list[Any] = []
        self.facts: list[dict[str, Any]] = []

    def build(self) -> None:
        """Start the processes and the workers in them.

        An error of a worker's constructor is raised here.
        """
        self.begin()
        self.wait()

    def begin(self) -> None:
        """Ask for the processes and their workers."""
        import ray

        cluster = self.cluster
        host_class = ray.remote(WorkerHost)
        self.hosts = [
            host_class.options(**self._options(rank)).remote(
                f"{self.name}/{rank}", threads=cluster.threads
            )
            for rank in range(self.n)
        ]
        meeting = None
        if self.n > 1:
            host, port = self._get([self.hosts[0].meet.remote(cluster.timeout_s)], "starting")[0]
            meeting = Rendezvous(host, port, f"{self.name}-{uuid.uuid4().hex[:6]}", self.n)
        payload = ray.put((ship(self.spec.cls), self.spec.args, self.spec.kwargs))
        self.building = [
            host.build.remote(payload, self._context(rank), meeting)
            for rank, host in enumerate(self.hosts)
        ]

    def wait(self) -> None:
        """Wait until all workers are there."""
        cluster = self.cluster
        answers = self._get(self.building, "starting")
        failed = [answer for answer in answers if isinstance(answer, Failure)]
        if failed:
            self.kill()
            failed[0].throw()
        self.facts = [
            {
                "worker": f"{self.name}/{rank}",
                "class": self.spec.cls.__name__,
                "device": cluster.device,
            }
            | answer
            for rank, answer in enumerate(answers)
        ]

    def _options(self, rank: int) -> dict[str, Any]:
        """Ray options of one worker: its device, or the node of the worker it sits beside."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resource = devices.platform(self.cluster.device).ray_resource
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1, "max_restarts": 0}
        if self.spec.beside is not None:
            node = self.spec.beside._transport.facts[rank]["node_id"]
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        elif not self.shared and resource == "GPU":
            options["num_gpus"] = 1
        elif not self.shared and resource != "CPU":
            options["resources"] = {resource: 1}
        return options

    def _context(self, rank: int) -> WorkerContext:
        return WorkerContext(
            name=self.name,
            dp_rank=rank,
            dp_size=self.n,
            device=self.cluster.device,
            seed=self.cluster.seed,
            timeout_s=self.cluster.timeout_s,
        )

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
        from ray import exceptions

        limit = self.cluster.timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(refs, timeout=limit)
        except exceptions.GetTimeoutError as error:
            _, running = ray.wait(refs, num_returns=len(refs), timeout=0)
            names = [f"{self.name}/{i}" for i, ref in enumerate(refs) if ref in running]
            raise TimeoutError(
                f"{self.name}.{what}: {', '.join(names)} did not answer within {limit:.0f} s. It "
                "may still run: wait with "
                "future.result(timeout_s=...), raise rk.launch(timeout_s=...), or "
                "cluster.respawn(group)."
            ) from error
        except exceptions.RayActorError as error:
            dead = self._dead(refs)
            raise RuntimeError(
                f"{self.name}.{what}: worker {', '.join(dead) or self.name} died "
                f"({str(error).splitlines()[0]}). "
                "Its state is lost; cluster.respawn(group) starts it again."
            ) from error

    def _dead(self, refs: list[Any]) -> list[str]:
        import ray
        from ray import exceptions

        dead = []
        for rank, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=0)
            except exceptions.RayActorError:
                dead.append(f"{self.name}/{rank}")
            except Exception:
                continue
        return dead

    def kill(self) -> None:
        """End the processes."""
        import ray

        if not ray.is_initialized():
            return
        for host in self.hosts:
            ray.kill(host)
        self.hosts = []

    def describe(self) -> list[dict[str, Any]]:
        """Facts of each worker, known since it started."""
        return [
            {key: value for key, value in row.items() if key != "node_id"} for row in self.facts
        ]


def adopt(result: Any, store: RayStore) -> Any:
    """Take over rows that a worker wrote: this process frees them when it names them no more."""
    columns = list(result.columns.values()) if isinstance(result, Batch) else [result]
    for column in columns:
        if isinstance(column, Column):
            column.store = store
            for part in column.parts:
                store.adopt(part)
    if isinstance(result, Batch):
        result.store = store
    return result
