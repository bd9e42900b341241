"""The processes of one group on Ray, and the calls to them."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cloudpickle

from rlkit import trace
from rlkit.batch import Batch
from rlkit.cluster import placement
from rlkit.cluster.calls import Failure, attached, current_class, merge
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.host import CONTROL, WorkerHost
from rlkit.functions import ship
from rlkit.workers.context import Rendezvous, WorkerContext

if TYPE_CHECKING:
    from rlkit.cluster.ray_cluster import RayCluster

SETTLE_S = 3.0
"""How long a call waits for one that was interrupted before it."""
RELEASE_S = 10.0
"""How long the peers of a failed rank may take to stop."""


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


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call on all ranks that was started."""

    method: str
    refs: list[Any]
    start_s: float


class RayTransport:
    """The processes of one group and the calls to them."""

    def __init__(self, cluster: "RayCluster", spec: GroupSpec) -> None:
        self.cluster, self.spec, self.name, self.n = cluster, spec, spec.name, spec.n
        self.owns = spec.beside is None and spec.takes_device
        self.place: Any = None  # placement group, if this group has one
        self.hosts: list[Any] = []
        self.building: list[Any] = []
        self.facts: list[dict[str, Any]] = []
        self.interrupted: Ticket | None = None

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
        host_class = ray.remote(concurrency_groups={CONTROL: 1})(WorkerHost)
        self.hosts = [
            host_class.options(**self._options(rank)).remote(
                f"{self.name}/{rank}",
                threads=cluster.threads,
                hides=None if self.spec.takes_device else cluster.device,
            )
            for rank in range(self.n)
        ]
        meeting = self._meeting() if self.n > 1 else None
        payload = ray.put((ship(current_class(self.spec.cls)), self.spec.args, self.spec.kwargs))
        self.building = [
            host.build.remote(payload, self._context(rank), meeting)
            for rank, host in enumerate(self.hosts)
        ]

    def wait(self) -> None:
        """Wait until all workers are there."""
        answers = self._collect(Ticket("starting", self.building, time.time()), None)
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
            other = beside._transport
            visible = placement.shared_visibility(kind, other.facts[rank]["accelerators"])
            return common | placement.options(kind, other.place, rank, owns=False) | visible
        if self.owns:
            return common | placement.options(kind, self.place, rank, owns=True)
        return common | {"num_cpus": 0}

    def _context(self, rank: int) -> WorkerContext:
        return WorkerContext(
            name=self.name,
            dp_rank=rank,
            dp_size=self.n,
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

    def kill(self) -> None:
        """End the processes and give their devices back."""
        import ray

        if not ray.is_initialized():
            return
        for host in self.hosts:
            ray.kill(host)
        self.hosts = []
        self.interrupted = None
        if self.place is not None:
            placement.release(self.place)
            self.place = None

    @property
    def processes(self) -> tuple[Any, ...]:
        """What tells these processes from those of a respawned group."""
        return tuple((row["node_id"], row["pid"]) for row in self.facts)

    def describe(self) -> list[dict[str, Any]]:
        """Facts of each worker, known since it started."""
        shown = ("worker", "class", "device", "node", "pid")
        return [{key: row[key] for key in shown} for row in self.facts]

    # ---- calls ----

    def check_open(self, method: str) -> None:
        """RuntimeError if the cluster was shut down, ConnectionError if it is lost."""
        self.cluster._check_open(f"{self.name}.{method}")

    def start(self, method: str, args: Any, kwargs: Any, stage: str, call: int) -> Ticket:
        """Begin a call on all ranks."""
        import ray

        self.check_open(method)
        self._settle()
        payload = ray.put((args, kwargs))
        refs = [host.call.remote(method, payload, stage, call) for host in self.hosts]
        return Ticket(method, refs, time.time())

    def finish(self, ticket: Ticket, batch: Batch | None, timeout_s: float | None) -> Any:
        """Wait for all ranks; the merged result, owned by this process.

        A KeyboardInterrupt here stops the call on the workers, too.
        """
        try:
            answers = self._collect(ticket, timeout_s)
        except KeyboardInterrupt:
            self.interrupted = ticket
            self._interrupt("by the user")
            raise
        store = self.cluster.store
        results = []
        for payload, span in answers:
            trace.current().add(replace(span, devices=self.cluster.num_devices_in_use))
            store.received_bytes += len(payload)
            results.append(attached(cloudpickle.loads(payload), store))
        return merge(results, batch)

    def done(self, ticket: Ticket) -> bool:
        """Whether all ranks have answered."""
        import ray

        refs = ticket.refs
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)

    def _collect(self, ticket: Ticket, timeout_s: float | None) -> list[Any]:
        """Answers of all ranks in rank order, or the first error, naming the worker."""
        limit = self.cluster.timeout_s if timeout_s is None else timeout_s
        deadline = time.time() + limit
        answers: dict[int, Any] = {}
        while len(answers) < len(ticket.refs):
            left = max(0.0, deadline - time.time())
            for rank, answer in self._arrived(ticket.refs, answers, left):
                answers[rank] = answer
            failed = [a for a in answers.values() if isinstance(a, Failure | Exception)]
            if failed:
                raise self._error(ticket, answers, failed[0])
            if len(answers) < len(ticket.refs) and time.time() >= deadline:
                names = [f"{self.name}/{i}" for i in range(len(ticket.refs)) if i not in answers]
                raise TimeoutError(
                    f"{self.name}.{ticket.method}: {', '.join(names)} did not answer within "
                    f"{limit:.0f} s. It may still run: wait with future.result(timeout_s=...), "
                    "raise rk.launch(timeout_s=...), or cluster.respawn(group)."
                )
        return [answers[rank] for rank in range(len(ticket.refs))]

    def _arrived(
        self, refs: Sequence[Any], known: dict[int, Any], timeout_s: float
    ) -> list[tuple[int, Any]]:
        """Ranks that have answered since, waiting for one: (rank, answer or exception)."""
        import ray

        self.cluster._check_lost()
        waiting = {ref: rank for rank, ref in enumerate(refs) if rank not in known}
        ready, _ = ray.wait([*waiting], num_returns=1, timeout=min(timeout_s, 1.0))
        arrived = []
        for ref in ready:
            try:
                arrived.append((waiting[ref], ray.get(ref, timeout=self.cluster.timeout_s)))
            except Exception as error:
                arrived.append((waiting[ref], error))
        return arrived

    def _error(
        self, ticket: Ticket, answers: dict[int, Any], first: Failure | Exception
    ) -> BaseException:
        """The error of a call of which one rank failed, after its peers were released."""
        from ray import exceptions

        rank = next(rank for rank, answer in answers.items() if answer is first)
        what = f"{self.name}.{ticket.method}"
        others = self._release(ticket, answers, f"{self.name}/{rank} failed")
        dead = [r for r, a in others.items() if isinstance(a, exceptions.RayActorError)]
        if dead:
            names = ", ".join(f"{self.name}/{r}" for r in sorted(dead))
            cause = str(others[dead[0]]).splitlines()[0]
            return RuntimeError(
                f"{what}: worker {names} died ({cause}). Its state is lost; "
                "cluster.respawn(group) starts the group again."
            )
        self._mend()
        # A peer that saw its connection break is a consequence; the rank that raised is the cause.
        causes = [a for a in others.values() if isinstance(a, Failure) and not a.of_peer]
        chosen = causes[0] if causes else first
        return chosen.raised() if isinstance(chosen, Failure) else chosen

    def _release(self, ticket: Ticket, answers: dict[int, Any], reason: str) -> dict[int, Any]:
        """Stop the ranks that still run the call; the answers of all that stopped in time."""
        answers = dict(answers)
        deadline = time.time() + RELEASE_S
        if len(answers) < len(ticket.refs):
            self._interrupt(reason)
        while len(answers) < len(ticket.refs) and time.time() < deadline:
            answers |= dict(self._arrived(ticket.refs, answers, deadline - time.time()))
        if len(answers) < len(ticket.refs):
            self.interrupted = ticket
        return answers

    def _mend(self) -> None:
        """After a failure that left all ranks alive: a new process group, and equal state."""
        import ray

        if self.n == 1 or self.interrupted is not None:
            return
        meeting = self._meeting()
        refs = [host.rejoin.remote(meeting) for host in self.hosts]
        for answer in ray.get(refs, timeout=self.cluster.timeout_s):
            if isinstance(answer, Failure):
                raise answer.raised()

    def _interrupt(self, reason: str) -> None:
        for host in self.hosts:
            host.interrupt.options(concurrency_group=CONTROL).remote(reason)

    def _settle(self) -> None:
        """Before a call: a call that was interrupted must have ended, or this says what runs."""
        import ray

        ticket = self.interrupted
        if ticket is None:
            return
        _, running = ray.wait(ticket.refs, num_returns=len(ticket.refs), timeout=SETTLE_S)
        if running:
            names = [f"{self.name}/{i}" for i, ref in enumerate(ticket.refs) if ref in running]
            raise RuntimeError(
                f"{', '.join(names)} still running {ticket.method}, for "
                f"{time.time() - ticket.start_s:.0f} s; it stops when the library call it is in "
                "returns. Try again later, or cluster.respawn(group)."
            )
        self.interrupted = None
        self._mend()
