"""Resharder: moves the actor's weights to the engines, verifies them, publishes the version when
all of it is there.
"""

import logging
import time
import uuid
from dataclasses import dataclass
from typing import Any

from rlkit import trace
from rlkit.reshard.plan import WholePlan, plan_equal

logger = logging.getLogger("rlkit.reshard")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardReport:
    """One move of the weights, measured."""

    seconds: float
    """Wall time from the call to the publication on the last target."""
    bytes: int
    """Bytes that arrived, all targets together."""
    peak_gib: float
    """Weights that one target held at the same time: those in use and those that arrived."""
    verified: bool
    """Every tensor's fingerprint matched on every target."""
    version: int
    """Policy version that the targets serve now."""


class Resharder:
    """Carries weights from ``source`` (actors) to ``target`` (rollout workers); both hold the whole
    model.

    New weights are staged beside the old ones and compared by fingerprint on every target before
    any target publishes them: after an error all targets still serve the old version.
    """

    def __init__(self, *, source: Any, target: Any, bucket_mib: float = 64.0) -> None:
        for name, group, method in (
            ("source", source, "send_weights"),
            ("target", target, "receive_weights"),
        ):
            if method not in getattr(group, "methods", {}):
                raise TypeError(
                    f"{name}: got {group!r}, need a worker group whose workers have {method}: "
                    "actors as the source, "
                    "rollout workers as the target."
                )
        self.source, self.target = source, target
        self.bucket_bytes = int(bucket_mib * 2**20)
        self._plan: WholePlan | None = None
        self._link: tuple[Any, ...] | None = None  # processes the open link connects
        self._published = 0  # version of the last move

    def plan(self) -> WholePlan:
        """What will move, bucket by bucket."""
        if self._plan is None:
            with trace.labelled("reshard/plan"):
                facts = [_first(group.weight_facts()) for group in (self.source, self.target)]
            self._plan = plan_equal(
                *facts, num_targets=len(self.target), bucket_bytes=self.bucket_bytes
            )
        return self._plan

    def reshard(self) -> ReshardReport:
        """Move the source's weights as they are now; the targets' version becomes the source's."""
        plan, start = self.plan(), time.time()
        with trace.current().span("reshard", devices=1), trace.labelled("reshard/transfer"):
            version = _first(self.source.version)
            if version < self._published:
                logger.warning(
                    "%s: its version %d is older than version %d of %s, which will be replaced.",
                    self.source.name, version, self._published, self.target.name,
                )  # fmt: skip
            try:
                self._transfer(plan)
                self.target.publish_weights(version=version)
                self._published = version
            except Exception:
                self._link = None  # whoever failed, the next call connects anew
                _quietly(self.target.discard_weights)
                raise
        per_target = plan.nbytes // max(1, plan.num_targets)
        return ReshardReport(
            seconds=time.time() - start,
            bytes=plan.nbytes,
            peak_gib=2 * per_target / 2**30,
            verified=True,
            version=version,
        )

    def _transfer(self, plan: WholePlan) -> None:
        if self.source.in_process:
            self.target.stage_weights(self.source.weights(), self.source.fingerprints())
            return
        self._connect()
        _all_or_none(
            lambda: self.target.submit.receive_weights(plan.buckets),
            lambda: self.source.submit.send_weights(plan.buckets),
        )

    def _connect(self) -> None:
        """A process group over the source's first rank and all targets.

        Kept while the processes live.
        """
        processes = (self.source.processes, self.target.processes)
        if self._link == processes:
            return
        host, port = _first(self.source.meet_targets())
        name, size = f"weights-{uuid.uuid4().hex[:8]}", 1 + len(self.target)
        join = (host, port, name, size)
        _all_or_none(
            lambda: self.target.submit.join_link(*join, 1),
            lambda: self.source.submit.join_link(*join, 0),
        )
        self._link = processes

    def __repr__(self) -> str:
        return f"Resharder({self.source.name} -> {self.target.name})"


def _first(value: Any) -> Any:
    """The first rank's answer: a list of one a rank, or the answer of the only rank."""
    return (
        value[0] if isinstance(value, list) and value and not hasattr(value[0], "nbytes") else value
    )


def _all_or_none(*starts: Any) -> None:
    """Start calls that wait for each other, and wait for them; one that fails stops the others."""
    futures: list[Any] = []
    try:
        for start in starts:
            futures.append(start())
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            _quietly(future.cancel)
        raise


def _quietly(call: Any) -> None:
    """Clean up after an error that is about to be raised; a second error must not replace it."""
    try:
        call()
    except Exception as error:
        logger.warning("after a failed reshard: %s", error)
