"""The loops of the notebooks as functions, for scripts and experiments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlkit.algo import clipped_policy_loss, group_metrics, group_relative, kl_k3
from rlkit.checkpoint import Checkpointer
from rlkit.checks import did_you_mean
from rlkit.engines import TorchEngine
from rlkit.metrics import MetricLog
from rlkit.models import Pretrained
from rlkit.reshard import Resharder
from rlkit.rewards import reward_metrics
from rlkit.tasks import Task, evaluate, score
from rlkit.types import LossFn, RewardFn
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


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Run:
    """What a recipe leaves: its log, and the parts, which work as long as the cluster is open."""

    log: MetricLog
    """A record a train step."""
    actor: Any
    """Group of the trained policy: ``run.actor.save_pretrained(folder)``."""
    rollout: Any
    """Group of engines that have its weights: ``rk.evaluate(run.rollout, ...)``."""
    reference: Any
    """Group of the policy that training began with."""
    resharder: Resharder
    """From the actor to the rollout."""

    def __repr__(self) -> str:
        return f"Run({self.log}, {', '.join(item.name for item in fields(self)[1:])})"


def grpo(
    cluster: Any,
    model: Pretrained,
    task: Task,
    config: GRPOConfig | None = None,
    *,
    on_step: Callable[[MetricLog], None] | None = None,
    checkpoint: Checkpointer | None = None,
    reward_fn: RewardFn | None = None,
    **wrong: Any,
) -> Run:
    """GRPO (Shao et al., 2024): the trained actor, and the log.

    The loop of notebook 01 on an open cluster. ``on_step(log)`` runs after each step. With a
    ``checkpoint`` it saves itself, and goes on from the newest one in there. ``reward_fn``, perhaps
    of ``rk.rewards.combine``, rewards training; evaluation is the task's own verifier, and so is
    training without it. Numbers such as ``steps`` are in ``config``; others by keyword are an
    error.
    """
    _check_config("grpo", GRPOConfig, config, wrong)
    config = config or GRPOConfig()
    loss_fn = _grpo_loss(config.clip_low, config.clip_high, config.kl_coef)
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
        first = restored.next_step
    resharder.reshard()  # connects the processes, outside the first step's time
    log.start()
    for step in range(first, config.steps):
        batch = rollout.generate(next(prompts), n=config.n, temperature=config.temperature)
        batch["rewards"] = score(reward_fn or task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        batch["ref_logprobs"] = reference.compute_logprobs(batch)
        rewards, group_ids = batch["rewards"], batch["group_ids"]
        batch["advantages"] = batch.expand(group_relative(rewards, group_ids))
        metrics = actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches)
        metrics |= group_metrics(rewards, group_ids)
        metrics["response/length_mean_tokens"] = batch.lengths("response_ids").mean()
        resharder.reshard()
        if config.eval_every and (step + 1) % config.eval_every == 0:
            metrics |= evaluate(rollout, held_out, task.verify)
        log.add(step, metrics | reward_metrics(batch))
        due = (step + 1) % config.save_every == 0 or step + 1 == config.steps
        if checkpoint is not None and due:
            checkpoint.save(step, workers={"actor": actor}, prompts=prompts, log=log)
        if on_step is not None:
            on_step(log)
    return Run(log=log, actor=actor, rollout=rollout, reference=reference, resharder=resharder)


def _grpo_loss(clip_low: float, clip_high: float, kl_coef: float) -> LossFn:
    def loss_fn(logprobs: Any, batch: Any) -> Any:
        loss, metrics = clipped_policy_loss(logprobs, batch, clip_low=clip_low, clip_high=clip_high)
        kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
        return loss + kl_coef * kl, metrics | {"policy/kl_ref": kl}

    return loss_fn


def _check_config(recipe: str, cls: type, config: Any, wrong: Mapping[str, Any]) -> None:
    """TypeError for numbers given otherwise than in a ``cls``; says how to give them."""
    known = [item.name for item in fields(cls)]
    if wrong:
        name, value = next(iter(wrong.items()))
        if name in known:
            more = f"Pass {cls.__name__}({name}={value!r})."
        else:
            more = f"{cls.__name__} has {known}.{did_you_mean(name, known)}"
        raise TypeError(
            f"{recipe}: got {name}={value!r}, need numbers of the run in a {cls.__name__}, the "
            f"fourth argument. {more}"
        )
    if config is not None and not isinstance(config, cls):
        raise TypeError(
            f"{recipe}: got {type(config).__name__} as the config, need a {cls.__name__} such as "
            f"{cls.__name__}({known[0]}=6)."
        )
