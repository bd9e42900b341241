"""PPO's clip: with the ratio to the policy that sampled, or with that of a later, proximal one."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, token_mean
from rlkit.algo.correction import Weight, importance_weight
from rlkit.algo.losses.ratios import (
    check_clip,
    column_like,
    masked_advantages,
    masked_log_ratio,
    policy_metrics,
)
from rlkit.algo.ratio import ratio_of


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: int | float = 0.2,
    clip_high: int | float = 0.2,
    dual_clip: int | float | None = None,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate over tokens of max(−ρA, −clip(ρ, 1 − clip_low, 1 + clip_high) A).

    ρ = exp(logprobs − old_logprobs), A the advantages (PPO, 1707.06347, 2017); clip_high above
    clip_low is DAPO's (2503.14476, 2025). dual_clip c > 1 also bounds the loss of tokens with A < 0
    by −cA (1912.09729, 2019): one far above the old policy no longer pulls.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch. On-policy every ρ is 1
    and the value may be 0; the gradient is not. The loss in the metrics keeps its sign.
    """
    check_clip(clip_low, clip_high, dual_clip)
    log_ratio = masked_log_ratio(logprobs, batch)  # [B, T]
    losses, held = clipped(
        ratio_of(log_ratio),
        masked_advantages(logprobs, batch),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    loss = aggregate(losses, batch)
    return loss, policy_metrics(loss, log_ratio, batch, held=held)


def decoupled_policy_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: int | float = 0.2,
    clip_high: int | float = 0.2,
    dual_clip: int | float | None = None,
    weight: Weight = importance_weight,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate over tokens of w · max(−uA, −clip(u, 1 − clip_low, 1 + clip_high) A).

    Three policies: the behaviour policy sampled (rollout_logprobs), the proximal one is that of the
    start of this train step (old_logprobs, computed when the batch arrives), the current one moves
    with each minibatch (logprobs). u = current / proximal is clipped, w = proximal / behaviour
    makes up for stale samples, so the clip does not pull back to an old policy (Hilton et al.,
    2110.00641, 2021; AReaL, 2505.24298, 2025, equation 5). All [B, T].

    weight: a function (old_logprobs, rollout_logprobs, response_mask) -> w [B, T], by default not
    capped; ``partial(truncated_importance_weight, cap=5)`` clamps it and
    ``partial(masked_importance_weight, high=5)`` leaves tokens beyond out. Those stay in the
    denominator.
    """
    check_clip(clip_low, clip_high, dual_clip)
    mask = batch["response_mask"]
    proximal = column_like("old_logprobs", logprobs, batch)
    behaviour = column_like("rollout_logprobs", logprobs, batch)
    w = weight(proximal, behaviour, mask)
    log_ratio = masked_log_ratio(logprobs, batch)
    losses, held = clipped(
        ratio_of(log_ratio),
        w * masked_advantages(logprobs, batch),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    loss = aggregate(losses, batch)
    metrics = policy_metrics(loss, log_ratio, batch, held=held)
    on_tokens = torch.where(mask.bool(), w, 0.0)
    metrics["policy/behaviour_weight_mean"] = batch.token_mean(w)
    metrics["policy/behaviour_weight_max"] = on_tokens.amax() if w.numel() else on_tokens.sum()
    return loss, metrics


def clipped(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: int | float,
    clip_high: int | float,
    dual_clip: int | float | None = None,
) -> tuple[Tensor, Tensor]:
    """Losses max(−ρA, −clip(ρ)A) and whether the clip holds a token's gradient back, all [B, T]."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantages, -bounded * advantages)
    held = ((advantages > 0) & (ratio > 1 + clip_high)) | (
        (advantages < 0) & (ratio < 1 - clip_low)
    )
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
        held = held | ((advantages < 0) & (ratio > dual_clip))
    return losses, held
