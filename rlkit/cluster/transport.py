"""The processes of one group on Ray, and the calls to them."""

import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import cloudpickle

from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster import placement
from rlkit.cluster.calls import Call, Failure, attached, current_class, merge
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.host import CONTROL, WorkerHost
from rlkit.cluster.pipeline import Pipeline
from rlkit.cluster.streams import STREAM, Stream
from rlkit.config import Layout
from rlkit.functions import ship
from rlkit.shield import shield
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
    layout: Layout | None = None
    """How they share a model; None: each has all of it."""
    beside: WorkerGroup | None = None
    """Group whose devices it shares."""
    takes_device: bool = True
    """Whether each worker occupies a device of its own."""


class RayTransport:
    """The processes of one group and the calls to them."""

    def __init__(self, cluster: "RayCluster", spec: GroupSpec) -> None:
        self.cluster, self.spec, self.name, self.n = cluster, spec, spec.name, spec.n
        self.owns = spec.beside is None and spec.takes_device
        self.place: Any = None  # placement group, if this group has one
        self.hosts: list[Any] = []
        self.building: list[Any] = []
        self._starting = threading.Lock()
        self.facts: list[dict[str, Any]] = []
        self.pipeline = Pipeline(
            self.name,
            timeout_s=cluster.timeout_s,
            check=lambda: cluster._check_open(self.name),
            send=self._send,
            mend=self._mend,
            discard=self._results,
            died=lambda ranks: cluster._drop_leases([f"{self.name}/{rank}" for rank in ranks]),
        )

    # ---- life ----

    def build(self) -> None:
        """Start the processes and the workers in them.

        An error of a worker's constructor is raised here, and nothing is left behind.
        """
        try:
            self.begin()
            self.wait()
        except BaseException:
            self.kill()
            raise

    def begin(self) -> None:
        """Ask for the processes and their workers."""
        import ray

        cluster = self.cluster
        if self.owns and self.place is None:
            self.place = placement.reserve(cluster.device, self.n, name=self.name)
        as_actor: Any = ray.remote(concurrency_groups={CONTROL: 1, STREAM: 4})  # pyright: ignore[reportCallIssue]
        host_class = as_actor(WorkerHost)
        self.hosts = [
            host_class.options(**self._options(rank)).remote(
                f"{self.name}/{rank}",
                threads=cluster.threads,
                paths=sys.path,
                hides=None if self.spec.takes_device else cluster.device,
            )
            for rank in range(self.n)
        ]
        meeting = self._meeting() if self.n > 1 else None
        payload = ray.put((ship(self.spec.cls), self.spec.args, self.spec.kwargs))
        self.building = [
            host.build.remote(payload, self._context(rank), meeting)
            for rank, host in enumerate(self.hosts)
        ]

    def wait(self) -> None:
        """Wait until all workers are there."""
        building = Call(-1, "starting", self.building, None)
        self.pipeline.add(building)
        answers = self.pipeline.wait(building, None)
        self.pipeline.open()
        common = {"class": self.spec.cls.__name__, "device": self.cluster.device}
        self.facts = [
            {"worker": f"{self.name}/{rank}", **common, **answer}
            for rank, answer in enumerate(answers)
        ]

    def _options(self, rank: int) -> dict[str, Any]:
        """Ray options of one worker: its own device, or the device of the worker it sits beside."""
        kind, beside = self.cluster.device, self.spec.beside
        common = {"max_restarts": 0, "enable_task_events": False}
        if beside is not None:
            other = cast("RayTransport", beside._transport)
            visible = placement.shared_visibility(kind, other.facts[rank]["accelerators"])
            return common | placement.options(kind, other.place, rank, owns=False) | visible
        if self.owns:
            return common | placement.options(kind, self.place, rank, owns=True)
        return common | {"num_cpus": 0}

    def _context(self, rank: int) -> WorkerContext:
        return WorkerContext.at(
            rank,
            self.n,
            self.spec.layout,
            name=self.name,
            device=self.cluster.device,
            seed=self.cluster.seed,
            timeout_s=self.cluster.timeout_s,
        )

    def _meeting(self) -> Rendezvous:
        """A new meeting point, open in rank 0."""
        import ray

        opening = self.hosts[0].meet.options(concurrency_group=CONTROL)
        host, port = ray.get(opening.remote(self.cluster.timeout_s), timeout=self.cluster.timeout_s)
        return Rendezvous(host, port, f"{self.name}-{uuid.uuid4().hex[:6]}", self.n)

    def respawn(self) -> None:
        """New processes in the same place, from the class as its module has it now."""
        self.kill(keep_place=True)
        self.spec = replace(self.spec, cls=current_class(self.spec.cls))
        self.build()

    def kill(self, *, keep_place: bool = False) -> None:
        """End the processes and give their devices back, unless ``keep_place``."""
        import ray

        if not ray.is_initialized():
            return
        self.pipeline.close("its processes were ended")
        for host in self.hosts:
            ray.kill(host)
        self.hosts = []
        if self.place is not None and not keep_place:
            placement.release(self.place)
            self.place = None

    @property
    def lost(self) -> str:
        """Which worker died, if one did."""
        return self.pipeline.lost

    @property
    def processes(self) -> tuple[Any, ...]:
        """What tells these processes from those of a respawned group."""
        return tuple((row["node_id"], row["pid"]) for row in self.facts)

    @property
    def owner(self) -> WorkerGroup | None:
        """The group whose devices the workers share; None: they have their own."""
        beside = self.spec.beside
        return None if beside is None else beside._transport.owner or beside

    def describe(self) -> list[dict[str, Any]]:
        """Facts of each worker, known since it started."""
        shown = ("worker", "class", "device", "node", "pid")
        return [{key: row[key] for key in shown} for row in self.facts]

    # ---- calls ----

    def check_open(self, method: str) -> None:
        """RuntimeError if the cluster was shut down, ConnectionError if it is lost."""
        self.cluster._check_open(f"{self.name}.{method}")

    def start(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Call:
        """Begin a call on all ranks."""
        import ray

        what = args[0] if method == "__getattribute__" else method  # a property's name
        self.check_open(what)
        with self._starting:  # all ranks get the calls of several threads in one order
            self.pipeline.settle()
            payload, epoch = ray.put((args, kwargs)), self.pipeline.epoch
            with shield:  # on all ranks or on none, for they would wait for each other
                refs = [h.call.remote(method, payload, stage, call, epoch) for h in self.hosts]
                started = Call(call, what, refs, (args, kwargs))
                self.pipeline.add(started)
        return started

    def stream(self, call: Call) -> Stream:
        """What the ranks of a call yield, as it comes."""
        return Stream(self, call)

    def finish(self, call: Call, batch: Batch | None, timeout_s: float | None) -> Any:
        """Wait for all ranks; the merged result, owned by this process.

        A KeyboardInterrupt here stops the call on the workers, too.
        """
        self.check_open(call.what)
        try:
            with trace.wait(call.what):
                answers = self.pipeline.wait(call, timeout_s)
        except KeyboardInterrupt:
            self.pipeline.cancel(call, "by the user")
            raise
        return merge([self._results(answer) for answer in answers], batch)

    def _results(self, answer: tuple[bytes, Sequence[trace.Span]]) -> Any:
        """One rank's result, its rows owned by this process, and its spans in the trace."""
        payload, spans = answer
        trace.current().extend(spans, devices=max(1, self.cluster.num_devices_in_use))
        return self.attached(payload)

    def attached(self, payload: bytes) -> Any:
        """What a worker sent, its rows owned by this process."""
        self.cluster.store.received_bytes += len(payload)
        return attached(cloudpickle.loads(payload), self.cluster.store)

    def done(self, call: Call) -> bool:
        """Whether the call has ended, or never will: its cluster is closed."""
        return not self.cluster.open or self.pipeline.done(call)

    def cancel(self, call: Call) -> None:
        """Stop a call, or keep it from starting."""
        self.pipeline.cancel(call, "cancelled")

    def abandon(self, call: Call) -> None:
        """Nobody names the call's future any more."""
        if self.cluster.open:
            self.pipeline.abandon(call)

    def _send(self, method: str, *args: Any) -> list[Any]:
        """Call a control method of every host, beside the call that runs."""
        return [
            getattr(host, method).options(concurrency_group=CONTROL).remote(*args)
            for host in self.hosts
        ]

    def _mend(self) -> None:
        """After a failure that left all ranks alive: a new process group, and equal state."""
        import ray

        meeting = self._meeting()
        refs = [host.rejoin.remote(meeting) for host in self.hosts]
        for answer in ray.get(refs, timeout=self.cluster.timeout_s):
            if isinstance(answer, Failure):
                raise answer.raised()
