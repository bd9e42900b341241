"""The loops of the notebooks as functions, for scripts and experiments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlkit.algo import clipped_policy_loss, group_relative, kl_k3
from rlkit.batch import Batch
from rlkit.checkpoint import Checkpointer
from rlkit.engines import TorchEngine
from rlkit.metrics import MetricLog
from rlkit.models import Pretrained
from rlkit.reshard import Resharder
from rlkit.rewards import reward_metrics
from rlkit.tasks import Task, evaluate, score
from rlkit.types import RewardFn
from rlkit.workers import ActorWorker, ReferenceWorker, RolloutWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """Numbers of a GRPO run."""

    steps: int = 100
    """Train steps."""
    size: int = 32
    """Prompts a step."""
    n: int = 8
    """Responses a prompt."""
    temperature: float = 1.0
    """Of sampling; the trainer's logprobs follow it."""
    max_new_tokens: int = 32
    """Longest response."""
    lr: float = 2e-4
    """AdamW's learning rate."""
    minibatches: int = 2
    """Optimizer steps a train step."""
    clip_low: float = 0.2
    """Lower clip of the ratio."""
    clip_high: float = 0.2
    """Upper clip of the ratio."""
    kl_coef: float = 1e-3
    """Weight of the KL to the reference in the loss."""
    eval_every: int = 20
    """Train steps between evaluations; 0: never."""
    eval_prompts: int = 128
    """Held-out prompts of an evaluation."""
    save_every: int = 10
    """Train steps between checkpoints, for a run that has a checkpointer; the last step is saved,
    too."""


def grpo(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: GRPOConfig | None = None,
    *,
    on_step: Callable[[MetricLog], None] | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
) -> MetricLog:
    """GRPO (Shao et al., 2024).

    The loop of notebook 01 on an open cluster. ``on_step(log)`` runs after each step. With a
    ``checkpoint`` it saves itself, and goes on from the newest one in there. ``reward_fn``, perhaps
    of ``rk.rewards.combine``, rewards training; evaluation is the task's own verifier, and so is
    training without it.
    """
    config = config or GRPOConfig()

    def loss_fn(logprobs: Any, batch: Batch) -> Any:
        loss, metrics = clipped_policy_loss(
            logprobs, batch, clip_low=config.clip_low, clip_high=config.clip_high
        )
        kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
        return loss + config.kl_coef * kl, metrics | {"policy/kl_ref": kl}

    rollout = cluster.spawn(
        RolloutWorker, model, engine=TorchEngine, max_new_tokens=config.max_new_tokens
    )
    actor = cluster.spawn(ActorWorker, model, lr=config.lr)
    reference = cluster.spawn(ReferenceWorker, model, colocate_with=actor)
    resharder = Resharder(source=actor, target=rollout)
    held_out, log = task.held_out(config.eval_prompts), MetricLog()
    prompts, first = task.stream(size=config.size), 0
    if checkpoint is not None:
        restored = checkpoint.load(workers={"actor": actor}, prompts=prompts, log=log)
        first, held_out = restored.next_step, restored.batches.get("held_out", held_out)
    resharder.reshard()  # connects the processes, outside the first step's time
    log.start()
    for step in range(first, config.steps):
        batch = rollout.generate(next(prompts), n=config.n, temperature=config.temperature)
        batch["rewards"] = score(reward_fn or task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        batch["ref_logprobs"] = reference.compute_logprobs(batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches)
        resharder.reshard()
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(rollout, held_out, task.verify)
        log.add(step, metrics | reward_metrics(batch))
        due = (step + 1) % config.save_every == 0 or step + 1 == config.steps
        if checkpoint is not None and due:
            more = {"held_out": held_out}  # the counts of its samples go on
            checkpoint.save(step, workers={"actor": actor}, prompts=prompts, log=log, batches=more)
        if on_step is not None:
            on_step(log)
    return log
