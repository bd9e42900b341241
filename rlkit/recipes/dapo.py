"""DAPO: prompts are drawn until they have signal, and the upper clip is higher."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from rlkit.algo import group_relative, has_signal, overlong_penalty
from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer
from rlkit.checks import whole
from rlkit.metrics import MetricLog
from rlkit.models import Pretrained
from rlkit.recipes.loop import Loop, LoopConfig, OnStep, Run, check_parts, checked, policy_loss
from rlkit.reshard import Resharder
from rlkit.tasks import Task, fill_groups, score
from rlkit.types import RewardFn
from rlkit.workers import ActorWorker, RolloutWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class DAPOConfig(LoopConfig):
    """Numbers of a DAPO run; ``size`` is both prompts a round of sampling and groups a step."""

    clip_high: float = 0.28
    """Upper clip of the ratio, above the lower one: a token that is rare yet may grow."""
    max_rounds: int = 10
    """Rounds of sampling in a step before it is given up."""
    overlong_soft: int | None = None
    """Response tokens from which on a response loses reward, up to 1 at ``max_new_tokens``; None:
    three quarters of these."""

    def __post_init__(self) -> None:
        LoopConfig.__post_init__(self)
        self._needs_groups()
        whole("DAPOConfig.max_rounds", self.max_rounds, what="round")
        if self.overlong_soft is not None and not 0 <= self.overlong_soft < self.max_new_tokens:
            raise ValueError(
                f"DAPOConfig.overlong_soft: got {self.overlong_soft}, need at least 0 and less "
                f"than max_new_tokens={self.max_new_tokens}, or None for three quarters of it."
            )


def dapo(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: DAPOConfig | None = None,
    *,
    on_step: OnStep | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
    **wrong: Any,
) -> Run:
    """DAPO (2503.14476, 2025): the trained actor, and the log; arguments as those of ``grpo``.

    Groups are filtered by their accuracy; the overlong penalty comes after. The ``reward`` in the
    log is of the groups kept, penalty included; ``sampling/accuracy`` is of all that were drawn.
    When no more groups differ, the task being solved for instance, ``fill_groups`` raises: the
    error's ``run`` is what ``dapo`` would have returned.
    """
    config = checked("dapo", DAPOConfig, config, wrong, checkpoint)
    check_parts("dapo", model, task)
    loss_fn = policy_loss(config)
    hard = config.max_new_tokens
    soft = hard * 3 // 4 if config.overlong_soft is None else config.overlong_soft
    penalty = partial(overlong_penalty, soft=soft, hard=hard)
    rollout = cluster.spawn(
        RolloutWorker, model, engine=config.engine, max_new_tokens=config.max_new_tokens
    )
    actor = cluster.spawn(ActorWorker, model, lr=config.lr)
    resharder = Resharder(source=actor, target=rollout)
    run = Run(log=MetricLog(), actor=actor, rollout=rollout, resharder=resharder)

    def sample(num_missing: int) -> Batch:  # a round: one for a single group costs as much
        batch = rollout.generate(next(loop.prompts), n=config.n, temperature=config.temperature)
        batch["accuracy"] = score(task.verify, batch)
        batch["rewards"] = batch["accuracy"] if reward_fn is None else score(reward_fn, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)  # now: surplus is trained later
        return batch

    with Loop(run, task, config, checkpoint=checkpoint, on_step=on_step) as loop:
        restored = loop.start()
        surplus = restored.batches.get("carried")
        for step in range(restored.next_step, config.steps):
            filled = fill_groups(
                sample, _differs, num_groups=config.size, column="accuracy", surplus=surplus,
                max_rounds=config.max_rounds,
            )  # fmt: skip
            batch, surplus = filled.batch, filled.surplus
            batch["penalty"] = batch.apply(penalty, "response_mask")
            batch["rewards"] = batch["rewards"] + batch["penalty"]
            advantages = group_relative(batch["rewards"], batch["group_ids"])
            batch["advantages"] = batch.expand(advantages)
            metrics = actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches)
            resharder.reshard()
            later = {} if surplus is None else {"carried": surplus}
            loop.end_step(step, metrics | filled.metrics, batch, batches=later)
    return run


def _differs(group: Batch) -> bool:
    return bool(has_signal(group["accuracy"], group["group_ids"]).any())
