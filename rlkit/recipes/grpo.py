"""GRPO: the other responses to a prompt say how good a response is."""

from dataclasses import dataclass
from typing import Any

from rlkit.algo import group_metrics, group_relative, kl_k3
from rlkit.checkpoint import Checkpointer
from rlkit.metrics import MetricLog
from rlkit.models import Pretrained
from rlkit.recipes.loop import Loop, LoopConfig, OnStep, Run, check_parts, checked, policy_loss
from rlkit.reshard import Resharder
from rlkit.tasks import Task, score
from rlkit.types import LossFn, RewardFn
from rlkit.workers import ActorWorker, ReferenceWorker, RolloutWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig(LoopConfig):
    """Numbers of a GRPO run."""

    kl_coef: float = 1e-3
    """Weight of the KL to the reference in the loss."""

    def __post_init__(self) -> None:
        LoopConfig.__post_init__(self)
        self._finite("kl_coef")
        self._needs_groups()


def grpo(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: GRPOConfig | None = None,
    *,
    on_step: OnStep | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
    **wrong: Any,
) -> Run:
    """GRPO (Shao et al., 2024): the trained actor, and the log.

    The loop of notebook 01 on an open cluster. ``on_step(log)`` runs after each step. With a
    ``checkpoint`` it saves itself, and goes on from the newest one in there. ``reward_fn``, perhaps
    of ``rk.rewards.combine``, rewards training; evaluation is the task's own verifier, and so is
    training without it. Numbers such as ``steps`` are in ``config``; others by keyword are an
    error. An error in a step has the run so far as its attribute ``run``.
    """
    config = checked("grpo", GRPOConfig, config, wrong, checkpoint)
    check_parts("grpo", model, task)
    loss_fn = _loss(config)
    rollout = cluster.spawn(
        RolloutWorker, model, engine=config.engine, max_new_tokens=config.max_new_tokens
    )
    actor = cluster.spawn(ActorWorker, model, lr=config.lr)
    reference = cluster.spawn(ReferenceWorker, model, colocate_with=actor)
    resharder = Resharder(source=actor, target=rollout)
    parts = {"actor": actor, "rollout": rollout, "reference": reference, "resharder": resharder}
    run = Run(log=MetricLog(), **parts)
    with Loop(run, task, config, checkpoint=checkpoint, on_step=on_step) as loop:
        for step in range(loop.start().next_step, config.steps):
            batch = rollout.generate(next(loop.prompts), n=config.n, temperature=config.temperature)
            batch["rewards"] = score(reward_fn or task.verify, batch)
            batch["old_logprobs"] = actor.compute_logprobs(batch)
            batch["ref_logprobs"] = reference.compute_logprobs(batch)
            rewards, group_ids = batch["rewards"], batch["group_ids"]
            batch["advantages"] = batch.expand(group_relative(rewards, group_ids))
            metrics = actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches)
            resharder.reshard()
            loop.end_step(step, metrics | group_metrics(rewards, group_ids), batch)
    return run


def _loss(config: GRPOConfig) -> LossFn:
    clipped, kl_coef = policy_loss(config), config.kl_coef

    def loss_fn(logprobs: Any, batch: Any) -> Any:
        loss, metrics = clipped(logprobs, batch)
        kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
        return loss + kl_coef * kl, metrics | {"policy/kl_ref": kl}

    return loss_fn
