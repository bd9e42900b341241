"""What schedules ask of their parts, so that a wrong one is named before anything is generated."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlkit.schedule.staleness import StalenessRule

Record = dict[str, Any]


def check_calls(**parts: Any) -> None:
    """TypeError if a part of a loop is no function."""
    for name, part in parts.items():
        if not callable(part):
            raise TypeError(
                f"{name}: got {type(part).__name__}, need a function or a method, such as "
                "resharder.reshard of a resharder. Pass it without calling it."
            )


def check_prompts(prompts: Any) -> Iterable[Any]:
    """Batches of prompts, one after another."""
    if hasattr(prompts, "meta") or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts: got {type(prompts).__name__}, need batches of prompts one after another: "
            "task.batches(size=32, steps=100), or a list of them."
        )
    return prompts


def check_feed(feed: Any) -> None:
    """TypeError if ``feed`` does not generate by itself; RuntimeError if it does so already."""
    if not (hasattr(feed, "num_running") and hasattr(feed, "advance")):
        raise TypeError(
            f"feed: got {type(feed).__name__}, need one that generates by itself: "
            "rk.RolloutFeed(rollout, n=8), or a function: rollout_step."
        )
    if feed.num_running:
        raise RuntimeError(
            f"feed: got {feed!r}, need one that nobody uses. End the loop that has it (close() of "
            "its generator), call feed.close(), or make a feed and a rollout group for each loop."
        )


def check_executor(executor: Any) -> Any:
    """Where calls run; None: not said."""
    if isinstance(executor, type) or not (executor is None or hasattr(executor, "submit")):
        raise TypeError(
            f"executor: got {executor!r}, need one such as rk.schedule.Inline(); None: Threads()."
        )
    return executor


def check_rule(
    rule: Any, max_staleness: Any, first_size: Callable[[], int] | None
) -> StalenessRule:
    """The rule, or one of ``max_staleness`` for steps of ``first_size()`` groups.

    TypeError unless one of them is given, and for a number without ``first_size``: a backlog does
    not say how many groups a step has; ValueError if the rule bounds nothing.
    """
    if (rule is None) == (max_staleness is None):
        raise TypeError(
            f"asynchronous: got rule={rule!r} and max_staleness={max_staleness!r}, need one of "
            "them: max_staleness=4, or rule=StalenessRule(groups_per_step=32, max_staleness=4)."
        )
    if rule is None:
        if first_size is None:
            raise TypeError(
                f"asynchronous: got a Backlog and max_staleness={max_staleness!r}, need a rule, "
                "which says how many groups a step has and where the run is: "
                "StalenessRule(groups_per_step=32, max_staleness=4, version=actor.version)."
            )
        rule = StalenessRule(groups_per_step=first_size(), max_staleness=max_staleness)
    if not isinstance(rule, StalenessRule):
        raise TypeError(
            f"rule: got {rule!r}, need StalenessRule(groups_per_step=32, max_staleness=4)."
        )
    if math.isinf(rule.max_staleness) and rule.max_running is None:
        raise ValueError(
            "max_staleness: got inf without max_running, need a finite one, or a number of groups "
            "that may run: else all prompts there are would begin at once."
        )
    return rule


def returned(batch: Any) -> Any:
    """What ``rollout_step`` gave; TypeError for nothing."""
    if batch is None:
        raise TypeError(
            "rollout_step: got None back, need the responses: return rollout.generate(...), or for "
            "streamed rollout.stream(...)."
        )
    return batch


def record(step: int, batch: Any, metrics: Any, ages: Mapping[str, float] | None = None) -> Record:
    """``{"step", "batch", **metrics}``; TypeError if ``train_step`` gave no metrics."""
    if not isinstance(metrics, Mapping) or {"step", "batch"} & metrics.keys():
        got = list(metrics) if isinstance(metrics, Mapping) else type(metrics).__name__
        raise TypeError(
            f"train_step: got {got} back, need a dict of metrics without 'step' and 'batch', which "
            "the record has: return actor.update(...), or {}."
        )
    return {"step": step, "batch": batch, **(ages or {}), **metrics}
