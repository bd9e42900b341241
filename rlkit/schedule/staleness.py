"""How many groups may be submitted: one rule, of counts alone, for real and simulated runs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from rlkit.checks import fits, whole
from rlkit.schedule.stale import admit


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessRule:
    """Counts of a run in groups (prompts), and what they allow.

    With N groups submitted, the next one among them, a group may start while
    ``floor((N - 1) / groups_per_step) <= version + max_staleness`` (AReaL, 2505.24298, Eq. 3).
    That bounds the work in flight to ``(max_staleness + 1) * groups_per_step`` groups, hence the
    mean staleness; one very long response may still be trained later than that. A fraction as
    ``max_staleness`` is verl's threshold: a share of a step's groups ahead.

    Nothing changes in place: each method returns the rule after the event.
    """

    groups_per_step: int
    """Groups that one train step takes."""
    max_staleness: float = 0.0
    """Train steps that samples may lag behind; 0 is synchronous, ``inf`` has no bound."""
    stale_policy: Callable[..., Any] = admit
    """What becomes of groups older than that when they are to be trained: ``admit``, ``drop``,
    ``mask`` or a function of yours, ``(group, *, version, max_staleness) -> group`` or None."""
    max_running: int | None = None
    """Groups that may run at once, whatever their staleness."""
    version: int = 0
    """Train steps done."""
    running: int = 0
    """Groups submitted and unfinished."""
    accepted: int = 0
    """Groups finished and kept, trained ones too."""
    dropped: int = 0
    """Groups finished and not kept; they hold no slot."""

    def __post_init__(self) -> None:
        whole("groups_per_step", self.groups_per_step, what="group a train step")
        if not isinstance(self.max_staleness, Real):
            raise TypeError(
                f"max_staleness: got {self.max_staleness!r}, need a number of train steps."
            )
        if not self.max_staleness >= 0:
            raise ValueError(
                f"max_staleness: got {self.max_staleness}, need 0 (synchronous) or more."
            )
        if self.max_running is not None:
            whole("max_running", self.max_running, what="group, or None for no bound")
        for name in ("version", "running", "accepted", "dropped"):
            whole(name, getattr(self, name), least=0)
        if self.stale_policy is not admit:  # a simulator makes millions of rules
            fits("stale_policy", self.stale_policy, "group", version=0, max_staleness=0)

    @property
    def capacity(self) -> float:
        """Groups that may be submitted now; ``inf`` where nothing bounds them."""
        ahead = (self.version + self.max_staleness + 1) * self.groups_per_step
        stale = ahead if math.isinf(ahead) else math.floor(ahead)
        free = math.inf if self.max_running is None else self.max_running - self.running
        return max(0, min(free, stale - self.accepted - self.running))

    def submit(self, num: int = 1) -> "StalenessRule":
        """``num`` groups start."""
        if num > self.capacity:
            raise ValueError(
                f"submit: got {num} groups, need at most the capacity of {self.capacity} (version "
                f"{self.version}, {self.running} running, {self.accepted} accepted). Wait for a "
                "train step or for running groups."
            )
        return replace(self, running=self.running + num)

    def accept(self, num: int = 1) -> "StalenessRule":
        """``num`` running groups finish and are kept."""
        return replace(self, running=self._finished(num), accepted=self.accepted + num)

    def drop(self, num: int = 1) -> "StalenessRule":
        """``num`` running groups finish and are filtered or failed: their slots are free again."""
        return replace(self, running=self._finished(num), dropped=self.dropped + num)

    def drop_accepted(self, num: int = 1) -> "StalenessRule":
        """``num`` kept groups are found too old before training: their slots are free again."""
        untrained = self.accepted - self.version * self.groups_per_step
        if num > untrained:
            raise ValueError(
                f"drop_accepted: got {num} groups, need at most the {untrained} untrained ones."
            )
        return replace(self, accepted=self.accepted - num, dropped=self.dropped + num)

    def advance(self) -> "StalenessRule":
        """A train step ends."""
        return replace(self, version=self.version + 1)

    def rebase(self, *, version: int, untrained: int = 0) -> "StalenessRule":
        """After a resume: nothing runs, ``untrained`` groups were restored.

        Accepted is ``version * groups_per_step + untrained``; from 0 the capacity would be that of
        all steps done so far (areal-project/AReaL#1388).
        """
        accepted = version * self.groups_per_step + untrained
        return replace(self, version=version, running=0, accepted=accepted)

    def _finished(self, num: int) -> int:
        if num > self.running:
            raise ValueError(
                f"finished groups: got {num}, need at most the {self.running} that run."
            )
        return self.running - num
