"""PPO: a critic says what return to expect at each token."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.algo import (
    clipped_value_loss,
    gae,
    kl_k1,
    kl_penalised_rewards,
    moments,
    whiten,
)
from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer
from rlkit.metrics import MetricLog, StepMetrics
from rlkit.models import Pretrained
from rlkit.recipes.loop import Loop, LoopConfig, OnStep, Run, check_parts, checked, policy_loss
from rlkit.reshard import Resharder
from rlkit.tasks import Task, score
from rlkit.types import RewardFn
from rlkit.workers import ActorWorker, CriticWorker, ReferenceWorker, RolloutWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(LoopConfig):
    """Numbers of a PPO run."""

    size: int = 256
    """Prompts a step."""
    n: int = 1
    """Responses a prompt: the critic is the baseline."""
    critic_lr: float = 1e-3
    """AdamW's learning rate of the critic."""
    value_clip: float | None = 0.2
    """How far a value may move in a step, in units of the return; None: any way."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 0.95
    """1 trusts the reward alone, 0 the critic alone."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference in the reward; 0: neither KL nor reference."""

    def __post_init__(self) -> None:
        LoopConfig.__post_init__(self)
        for name in ("critic_lr", "kl_coef"):
            self._finite(name)
        for name in ("gamma", "lam"):
            self._finite(name, most=1.0)
        if self.value_clip is not None and not self.value_clip > 0:
            raise ValueError(
                f"PPOConfig.value_clip: got {self.value_clip}, need a number above 0, or None for "
                "no clip."
            )


def ppo(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: PPOConfig | None = None,
    *,
    on_step: OnStep | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
    **wrong: Any,
) -> Run:
    """PPO (1707.06347, 2017) with GAE: actor, critic and log; arguments as those of ``grpo``.

    Responses whose reward is not finite are left out: whitening would give them an advantage. A
    step in which fewer prompts are left than ``minibatches`` skips the rest of these, and counts
    them as ``skipped_steps``.
    """
    config = checked("ppo", PPOConfig, config, wrong, checkpoint)
    check_parts("ppo", model, task)
    loss_fn = policy_loss(config)
    value_loss = partial(clipped_value_loss, clip=config.value_clip)
    rollout = cluster.spawn(
        RolloutWorker, model, engine=config.engine, max_new_tokens=config.max_new_tokens
    )
    actor = cluster.spawn(ActorWorker, model, lr=config.lr)
    critic = cluster.spawn(CriticWorker, model, lr=config.critic_lr, colocate_with=actor)
    reference = None
    if config.kl_coef:
        reference = cluster.spawn(ReferenceWorker, model, colocate_with=actor)
    resharder = Resharder(source=actor, target=rollout)
    parts = {"actor": actor, "rollout": rollout, "reference": reference, "critic": critic}
    run = Run(log=MetricLog(), resharder=resharder, **parts)
    with Loop(run, task, config, checkpoint=checkpoint, on_step=on_step) as loop:
        for step in range(loop.start().next_step, config.steps):
            batch = rollout.generate(next(loop.prompts), n=config.n, temperature=config.temperature)
            batch["rewards"] = score(reward_fn or task.verify, batch)
            judged = batch.select(batch["rewards"].isfinite())
            num = min(config.minibatches, len(judged["group_ids"].unique()))
            metrics = StepMetrics()
            if num:
                judged["old_logprobs"] = actor.compute_logprobs(judged)
                judged["values"] = critic.compute_values(judged)
                if reference is not None:
                    judged["ref_logprobs"] = reference.compute_logprobs(judged)
                _estimate(judged, gamma=config.gamma, lam=config.lam, kl_coef=config.kl_coef)
                metrics |= critic.update(judged, loss_fn=value_loss, minibatches=num)
                metrics |= actor.update(judged, loss_fn=loss_fn, minibatches=num)
                resharder.reshard()
            for name in ("critic/skipped_steps", "actor/skipped_steps"):
                metrics[name] = metrics.get(name, 0.0) + config.minibatches - num
            loop.end_step(step, metrics, batch)
    return run


def _estimate(batch: Batch, *, gamma: float, lam: float, kl_coef: float) -> None:
    """Bind returns and whitened advantages [B, T], computed beside the rows: of each row three sums
    travel.
    """

    def advantages(rewards: Tensor, values: Tensor, mask: Tensor, *logprobs: Tensor) -> Tensor:
        if logprobs:
            rewards = kl_penalised_rewards(rewards, kl_k1(*logprobs), mask, coef=kl_coef)
        return gae(rewards, values, mask, gamma=gamma, lam=lam)[0]

    def sums(x: Tensor, mask: Tensor) -> list[Tensor]:
        return [moments(*row) for row in zip(x[:, None], mask[:, None], strict=True)]

    names = ["rewards", "values", "response_mask"]
    names += ["old_logprobs", "ref_logprobs"] if kl_coef else []
    batch["advantages"] = batch.apply(advantages, *names)
    batch["returns"] = batch.apply(torch.add, "advantages", "values")
    total = batch.apply(sums, "advantages", "response_mask").load(batch.uids).padded().sum(0)
    batch["advantages"] = batch.apply(partial(whiten, total=total), "advantages", "response_mask")
