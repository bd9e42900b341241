"""Training on samples of old weights: the engine gets those of some train steps ago."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

import rlkit as rk
from rlkit import algo
from rlkit.schedule import staleness_metrics

LAGS: dict[str, Callable[[int], int]] = {  # train step -> versions that the engine is behind
    "0": lambda step: 0,
    "2": lambda step: 2,
    "8": lambda step: 8,
    "unbounded": lambda step: step // 2,  # samples made twice as fast as trained
}
KEPT = [
    "eval/accuracy",
    "staleness/token_mean_steps",
    "policy/clip_fraction",
    "policy/behaviour_weight_max",
    "proximal/rollout_error",
    "proximal/interpolation_error",
]


def decoupled(logprobs: Any, batch: Any) -> Any:
    """PPO's clip around the policy that trained last; and how far two stand-ins are from it."""
    loss, metrics = algo.decoupled_policy_loss(logprobs, batch)
    proximal, rollout = batch["old_logprobs"], batch["rollout_logprobs"]
    near = algo.interpolated_logprobs(logprobs, rollout, staleness_steps=batch["staleness_steps"])
    metrics["proximal/rollout_error"] = batch.token_mean((rollout - proximal).abs())
    metrics["proximal/interpolation_error"] = batch.token_mean((near - proximal).abs())
    return loss, metrics


LOSSES = {"naive": algo.clipped_policy_loss, "decoupled": decoupled}


def run(name: str, lag: str, seed: int, config: Any, sources: dict) -> pd.DataFrame:
    """One run in this process: tidy rows of the kept metrics."""
    task = rk.tasks.reverse_digits(length=6, seed=seed)
    model = rk.models.tiny(pretrained="reverse_digits")
    with rk.launch(backend="local", seed=seed) as cluster:
        log = _loop(cluster, model, task, config, loss_fn=LOSSES[name], lag=LAGS[lag])
    sources |= log.sources
    facts = {"run": f"{name}, {lag}", "system": "rlkit", "model": "tiny-0.23M", "devices": 1}
    frame = log.tidy(**facts, seed=seed, source="measured")
    return frame[frame["metric"].isin(KEPT)]


def _loop(
    cluster: Any, model: Any, task: Any, config: Any, *, loss_fn: Any, lag: Callable[[int], int]
) -> rk.MetricLog:
    rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=config.max_new_tokens)
    actor = cluster.spawn(rk.ActorWorker, model, lr=config.lr)
    held_out, log = task.held_out(config.eval_prompts), rk.MetricLog()
    versions = [_copied(actor)]
    for step, prompts in enumerate(task.batches(size=config.size, steps=config.steps)):
        old = max(0, step - lag(step))
        rollout.load_weights(versions[old], version=old)
        batch = rollout.generate(prompts, n=config.n, temperature=config.temperature)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["advantages"] = batch.expand(
            algo.group_relative(batch["rewards"], batch["group_ids"])
        )
        batch["staleness_steps"] = batch.expand(step - torch.as_tensor(batch["policy_version"]))
        naive = loss_fn is algo.clipped_policy_loss  # clips around the policy that sampled
        old_logprobs = batch["rollout_logprobs"] if naive else actor.compute_logprobs(batch)
        batch["old_logprobs"] = old_logprobs
        ages = staleness_metrics(batch, version=step)
        metrics = actor.update(batch, loss_fn=loss_fn, minibatches=config.minibatches) | ages
        versions.append(_copied(actor))
        if (step + 1) % config.eval_every == 0:
            rollout.load_weights(versions[-1], version=step + 1)
            metrics |= rk.evaluate(rollout, held_out, task.verify)
        log.add(step, metrics)
    return log


def _copied(actor: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in actor.weights().items()}
