"""Resharder: moves the actor's weights to the engines, verifies them, publishes the version when
all of it is there.
"""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlkit import trace
from rlkit.reshard.plan_cells import Cut
from rlkit.reshard.plan_layouts import plan_between
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_strategies import check_strategy, direct
from rlkit.reshard.report import ReshardReport
from rlkit.reshard.run import reshard_in_process
from rlkit.reshard.shards import Shards
from rlkit.shield import shield

logger = logging.getLogger("rlkit.reshard")


class Resharder:
    """Carries weights from ``source`` (actors) to ``target`` (rollout workers), whatever the
    layouts of the two.

    New weights are staged beside the old ones and compared by fingerprint on every target before
    any target publishes them: after an error all targets still serve the old version.

    strategy: a function of ``rlkit.reshard``. ``allgather_swap`` is for groups that share devices
    (``colocate_with=``); the actors' weights and optimizer states are then in host memory until
    the actors are called again.
    """

    def __init__(
        self, *, source: Any, target: Any, strategy: Callable[[Cut], ReshardPlan] = direct
    ) -> None:
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
        check_strategy(strategy)
        self.source, self.target, self.strategy = source, target, strategy
        self._plans: tuple[Any, ReshardPlan, ReshardPlan] | None = None
        self._name = f"weights-{uuid.uuid4().hex[:8]}"  # of the link: a source may have several
        self._link: tuple[Any, ...] | None = None  # processes the open link connects
        self._published = 0  # version of the last move

    def plan(self) -> ReshardPlan:
        """What moves between the devices of the two groups."""
        return self._planned()[0]

    def _planned(self) -> tuple[ReshardPlan, ReshardPlan]:
        """The plan by device, and by process: workers that share a device are processes of their
        own. Made again when a group has other processes.
        """
        processes = self.source.processes, self.target.processes
        if self._plans is None or self._plans[0] != processes:
            with trace.labelled("reshard/plan"):
                held = [_first(group.held()) for group in (self.source, self.target)]
            apart = len(self.source), len(self.target)
            if self.source.shares_devices(self.target):
                plan = plan_between(*held, devices=apart[0], strategy=self.strategy)
                moving = plan_between(*held, devices=apart, strategy=direct)
            else:
                plan = moving = plan_between(*held, devices=apart, strategy=self.strategy)
            self._plans = processes, plan, moving
        return self._plans[1:]

    def reshard(self) -> ReshardReport:
        """Move the source's weights as they are now; the targets' version becomes the source's."""
        (plan, moving), start = self._planned(), time.time()
        with trace.current().span("reshard", devices=1), trace.labelled("reshard/transfer"):
            version = _first(self.source.version)
            if version < self._published:
                logger.warning(
                    "%s: its version %d is older than version %d of %s, which will be replaced.",
                    self.source.name, version, self._published, self.target.name,
                )  # fmt: skip
            try:
                report = self._transfer(moving, version)
                self.target.publish_weights(version=version)
                self._published = version
            except BaseException:
                self._link = None  # whoever failed or was stopped, the next call connects anew
                _quietly(self.target.discard_weights)
                raise
            if plan.swaps:
                self.source.offload()
        return replace(report, seconds=time.time() - start)

    def _transfer(self, moving: ReshardPlan, version: int) -> ReshardReport:
        if self.source.in_process:
            shards = [Shards(moving, 0, self.source.shard()), Shards(moving, 1, {})]
            report = reshard_in_process(shards, version=version)
            return self.target.stage_weights(shards[1].hand_over(), report)
        self._connect(moving)
        reports, _ = _all_or_none(
            lambda: self.target.submit.receive_weights(version=version, link=self._name),
            lambda: self.source.submit.send_weights(version=version, link=self._name),
        )
        reports = reports if isinstance(reports, list) else [reports]
        return max(reports, key=lambda report: report.peak_gib)

    def _connect(self, moving: ReshardPlan) -> None:
        """A process group over all sources and all targets, which get the plan.

        Kept while the processes live.
        """
        processes = (self.source.processes, self.target.processes)
        if self._link == processes:
            return
        host, port = _first(self.source.meet_targets())
        meeting = (host, port, self._name, len(self.source) + len(self.target))
        _all_or_none(
            lambda: self.target.submit.join_link(meeting, len(self.source), moving),
            lambda: self.source.submit.join_link(meeting, 0, moving),
        )
        self._link = processes

    def __repr__(self) -> str:
        return f"Resharder({self.source.name} -> {self.target.name})"


def _first(value: Any) -> Any:
    """The first rank's answer: of a list of one a rank, or the answer of the only rank."""
    return value[0] if isinstance(value, list) else value


def _all_or_none(*starts: Any) -> list[Any]:
    """Start calls that wait for each other, and wait for them; one that fails stops the others."""
    futures: list[Any] = []
    try:
        for start in starts:
            with shield:  # else an interrupt leaves a call running that nobody knows of
                futures.append(start())
        return [future.result() for future in futures]
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
