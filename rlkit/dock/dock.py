"""TransferDock: what a stage or a notebook sees of the dock; CentralDock, to compare with.

Values go to the warehouse of the caller's node and from there straight to who asks for them;
controllers hear and tell where they are.
"""

import copy
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np

from rlkit.batch import Batch
from rlkit.checks import finite
from rlkit.dock import inspector, recovery, writes
from rlkit.dock.explain import short_of
from rlkit.dock.lease import Lease, granted
from rlkit.dock.messages import (
    Notice,
    Peers,
    Places,
    Request,
    Shortage,
    StaleLeaseError,
)
from rlkit.dock.samplers import in_order
from rlkit.dock.traffic import DRIVER, Traffic
from rlkit.dock.transport import LocalTransport, Transport
from rlkit.dock.values import (
    assemble,
    columns_of,
    handles_of,
    meta_of,
    names_of,
    node_of,
    rows_of,
    stamp_of,
    text,
    uids_of,
)


class TransferDock:
    """Rows of named columns on the nodes that made them, handed from stage to stage."""

    def __init__(
        self,
        transport: Transport | None = None,
        *,
        node: str | None = None,
        holder: str | None = None,
        partition: str = "train",
        timeout_s: float = 60.0,
    ) -> None:
        """Without a transport: one node in this process. ``holder`` names who takes leases."""
        self.transport = LocalTransport() if transport is None else transport
        if not hasattr(self.transport, "controllers"):
            raise TypeError(
                f"transport: got {type(transport).__name__}, need a transport, such as "
                "LocalTransport(nodes, graph=...). On a cluster cluster.dock() has it."
            )
        self.node = node_of(node or self.transport.here, self.transport.nodes)
        holder = holder or f"{self.node}/{os.getpid()}.{threading.get_ident() % 10_000}"
        self.holder, self.partition = text("holder", holder), text("partition", partition)
        self.timeout_s = finite("timeout_s", timeout_s)
        self._inspector = inspector.Inspector()

    def at(
        self, *, node: str | None = None, holder: str | None = None, partition: str | None = None
    ) -> Self:
        """The same dock from another node, for another holder, or of another partition."""
        other = copy.copy(self)
        other.node = node_of(node or self.node, self.transport.nodes)
        other.holder = text("holder", holder or self.holder)
        other.partition = text("partition", partition or self.partition)
        return other

    def arrived(self, holder: str) -> Self:
        """The dock as a worker process uses it, which got it from the driver."""
        return self.at(node=self.transport.here, holder=holder)

    def _home(self) -> str:
        """The node whose warehouse takes what is put."""
        return self.node

    # ---- values in and out ----

    def put(
        self,
        columns: Mapping[str, Any],
        uids: Any,
        *,
        stage: str = DRIVER,
        group_ids: Any = None,
        policy_version: Any = None,
        timeout_s: float | None = None,
    ) -> None:
        """Write columns of rows ``uids`` [N]: tensors, lists, ``Rows`` or ``Column``s.

        Columns of the cluster's store stay on the nodes where they are. ``stage`` is who writes.
        New rows belong to this dock's partition; ``group_ids`` and ``policy_version`` [N] stay as
        they are if left out (of new rows: the uid, 0). Waits while the stages' capacity is used up.
        """
        uids, columns = uids_of(uids), columns_of(columns)
        given = meta_of("group_ids", group_ids, uids)
        groups, limit = uids if given is None else given, self._limit(timeout_s)
        writes.admit(self.transport, uids, groups, timeout_s=limit)
        self._enter(columns, uids, text("stage", stage), group_ids, policy_version)

    def _limit(self, timeout_s: float | None) -> float:
        return finite("timeout_s", self.timeout_s if timeout_s is None else timeout_s)

    def _enter(
        self,
        columns: Mapping[str, Any],
        uids: np.ndarray,
        stage: str = DRIVER,
        group_ids: Any = None,
        policy_version: Any = None,
    ) -> None:
        """Write rows for which there is room."""
        handles = {n: v for n, v in columns.items() if writes.is_handle(self.transport, v)}
        keeps = not self.transport.sends
        rows = {n: rows_of(n, v, uids, copy=keeps) for n, v in columns.items() if n not in handles}
        notice = Notice(
            node=self._home(),
            stage=stage,
            uids=uids,
            columns={},
            group_ids=meta_of("group_ids", group_ids, uids),
            versions=meta_of("policy_version", policy_version, uids),
            partition=self.partition,
            stamp=stamp_of(self.holder),
        )
        if handles:
            writes.put_handles(self.transport, notice, handles)
        if rows:
            writes.put_values(self.transport, notice, rows, source=self.node)

    def fetch(
        self,
        uids: Any,
        columns: Sequence[str],
        timeout_s: float | None = None,
        *,
        stage: str = DRIVER,
    ) -> Batch:
        """Columns of rows by uid, once they are written; takes no lease."""
        uids, limit = uids_of(uids), self._limit(timeout_s)
        if not len(uids):
            raise ValueError("uids: got none, need at least one.")
        calls = {text("stage", stage): (uids, names_of(columns))}
        found = self.transport.controllers("where", calls, timeout_s=limit)[stage].value
        if isinstance(found, Shortage):
            raise short_of(self.transport, found, "fetch")
        return self._pull(stage, found)

    def get(
        self,
        consumer: str,
        columns: Sequence[str],
        n: int,
        sampler: Callable[[Any, int], Any] = in_order,
        timeout_s: float | None = None,
        *,
        least: int | None = None,
        peers: Peers | None = None,
    ) -> Lease:
        """Lease ``n`` rows (or at least ``least``) that have all ``columns``, for one stage.

        Waits until the sampler finds enough among the rows that nobody of the stage holds or has
        consumed. ``peers``: the processes of one model-parallel group get the same rows.
        """
        if text("consumer", consumer) == DRIVER:
            raise ValueError(
                f"consumer: got {DRIVER!r}, which only puts and fetches; need another stage's name."
            )
        limit = self._limit(timeout_s)
        request = Request(
            columns=names_of(columns), n=n, least=n if least is None else least, sampler=sampler,
            holder=self.holder, partition=self.partition, peers=peers, id=uuid.uuid4().hex,
        )  # fmt: skip
        calls = {consumer: (request,)}
        try:
            grant = self.transport.controllers("get", calls, timeout_s=limit)[consumer].value
        except KeyboardInterrupt:  # the controller may grant it yet
            self.transport.controllers("withdraw", {consumer: (request.id,)})
            raise
        if isinstance(grant, Shortage):
            raise short_of(self.transport, grant, "get")
        try:
            return Lease(grant, self._pull(consumer, grant.places))
        except BaseException:
            with suppress(StaleLeaseError):
                self.transport.controllers("nack", {consumer: (grant.token, self.holder)})
            raise

    def _pull(self, stage: str, places: Places) -> Batch:
        """The values, from the nodes that have them; on a cluster's driver their handles."""
        by_node = places.by_node()
        if self.transport.store is not None:
            told = self.transport.warehouses("describe", {n: (w,) for n, w in by_node.items()})
            return handles_of(places, self.transport.store, [r.value for r in told.values()])
        calls = {node: (wanted, (stage, self.node)) for node, wanted in by_node.items()}
        replies = self.transport.warehouses("fetch", calls)
        for node, reply in replies.items():
            key = (stage, node, self.node)
            writes.count_seconds(self.transport, key, node, reply.seconds)
        return assemble(places, {node: reply.value for node, reply in replies.items()})

    # ---- leases ----

    def ack(self, lease: Lease) -> None:
        """Done with the rows: no holder of this stage gets them again.

        A training stage acknowledges when its weights are saved, or puts the dock back with them.
        """
        grant, stage = granted(lease), lease.grant.stage
        calls = {stage: (grant.token, grant.holder)}
        uids, nodes = self.transport.controllers("ack", calls)[stage].value
        recovery.release(self.transport, stage, uids, nodes)

    def nack(self, lease: Lease) -> None:
        """Give the rows back; they are offered again at once."""
        grant = granted(lease)
        self.transport.controllers("nack", {grant.stage: (grant.token, grant.holder)})

    def heartbeat(self) -> dict[str, list[int]]:
        """Keep this holder's leases; returns stage -> tokens of those that live."""
        told = recovery.on_stages(self.transport, "renew", self.holder)
        return {stage: tokens for stage, tokens in told.items() if tokens}

    def drop(self, holder: str) -> dict[str, np.ndarray]:
        """A holder died: what it held is offered again; returns stage -> uids."""
        told = recovery.on_stages(self.transport, "drop", text("holder", holder))
        return {stage: uids for stage, uids in told.items() if len(uids)}

    # ---- rows as a whole ----

    def clear(self, uids: Any) -> None:
        """Forget rows, whatever stage they are in; late writes of them are dropped."""
        recovery.forget(self.transport, uids_of(uids))

    def lost(self, node: str) -> np.ndarray:
        """A node's rows are gone: forget them, and return the uids that must be made again.

        Rows that the last stage of the graph is done with need not be. Put the prompts of the
        others again, under the same uids.
        """
        return recovery.lost(self.transport, node_of(node, self.transport.nodes))

    def sweep(self) -> None:
        """Free rows whose last holder died between its ``ack`` and their release."""
        recovery.sweep(self.transport)

    def snapshot(self) -> recovery.Snapshot:
        """Rows, and what each stage has consumed and leased; nobody acknowledges meanwhile."""
        return recovery.snapshot(self.transport)

    def restore(self, snapshot: recovery.Snapshot) -> None:
        """Put the dock back, while nobody writes; rows that were leased are offered again."""
        recovery.restore(self.transport, snapshot)

    # ---- looking in ----

    def traffic(self) -> Any:
        """DataFrame: bytes, messages and seconds by stage, source node and target node."""
        total = Traffic()
        for moved in recovery.on_nodes(self.transport, "traffic").values():
            total.add(moved)
        return total.frame()

    def frame(self) -> Any:
        """DataFrame, a row a sample: identity, bytes, node of each column, state at each stage."""
        return inspector.frame(self.transport)

    def look(self, *, limit: int = 10, timeout_s: float = 1.0) -> inspector.Look:
        """The first rows by uid and counts of all, in one small question; what a dock draws.

        Never raises: if the controllers do not answer in time it says so and is the last look.
        """
        return self._inspector.look(type(self).__name__, self.transport, limit, timeout_s)

    def __repr__(self) -> str:
        return repr(self.look())

    def _repr_html_(self) -> str:
        return self.look()._repr_html_()


class CentralDock(TransferDock):
    """The same dock with one store for all: every row is put to and pulled from the first node."""

    def _home(self) -> str:
        return self.transport.nodes[0]
