"""Losses: (logprobs [B, T], batch) -> (scalar, dict of 0-d tensors).

Scalars and metrics add up over micro-batches and data-parallel ranks, as ``batch.token_mean`` makes
them; metrics that end in ``_max`` reduce by the largest. Nothing here waits for the device.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, token_mean
from rlkit.algo.kl import kl_k3


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate over tokens of max(−ρA, −clip(ρ, 1 − clip_low, 1 + clip_high) A).

    ρ = exp(logprobs − old_logprobs), A the advantages (PPO, 1707.06347, 2017); clip_high above
    clip_low is DAPO's (2503.14476, 2025). dual_clip c > 1 also bounds the loss of tokens with A < 0
    by −cA (1912.09729, 2019): one far above the old policy no longer pulls.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch. On-policy every ρ is 1
    and the value may be 0; the gradient is not. The loss in the metrics keeps its sign.
    """
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(
            f"clip_low, clip_high: got {clip_low}, {clip_high}; need 0 <= clip_low <= 1 and "
            "clip_high >= 0: ratios stay between 1 - clip_low and 1 + clip_high."
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip: got {dual_clip}, need more than 1, or None for none: it bounds what "
            "ratios above 1 can do. 3 is usual."
        )
    advantages = _like_logprobs("advantages", logprobs, batch)
    log_ratio = _masked_log_ratio(logprobs, batch)  # [B, T]
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)  # [B, T]
    held = ((advantages > 0) & (ratio > 1 + clip_high)) | (
        (advantages < 0) & (ratio < 1 - clip_low)
    )
    if dual_clip is not None:
        bounded = torch.minimum(losses, -dual_clip * advantages)
        losses = torch.where(advantages < 0, bounded, losses)
        held = held | ((advantages < 0) & (ratio > dual_clip))
    loss = aggregate(losses, batch)
    metrics = _ratio_metrics(log_ratio.detach(), batch)
    metrics["policy/loss"] = loss.detach()
    metrics["policy/clip_fraction"] = batch.token_mean(held.to(logprobs.dtype))
    return loss, metrics


def _ratio_metrics(log_ratio: Tensor, batch: LossBatch) -> dict[str, Tensor]:
    """How far the policy has gone from the old one: log_ratio [B, T], 0 where the mask is 0."""
    ratio = log_ratio.exp()
    on_tokens = torch.where(batch["response_mask"].bool(), ratio, 0.0)
    return {
        "policy/ratio_mean": batch.token_mean(ratio),
        "policy/ratio_max": on_tokens.amax() if on_tokens.numel() else on_tokens.sum(),
        # KL(old || new), for the old policy sampled: k3 with the old policy first
        "policy/kl_old": batch.token_mean(kl_k3(torch.zeros_like(log_ratio), log_ratio)),
    }


def _masked_log_ratio(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """logprobs − old_logprobs [B, T], 0 where the mask is 0.

    Masked before exp: an overflow under the mask would send back 0 * inf = NaN.
    """
    old = _like_logprobs("old_logprobs", logprobs, batch)
    return torch.where(batch["response_mask"].bool(), logprobs - old, 0.0)


def _like_logprobs(name: str, logprobs: Tensor, batch: LossBatch) -> Tensor:
    """A column of the batch that must be shaped as logprobs: broadcasting would hide a mistake."""
    values: Tensor = batch[name]
    if values.shape != logprobs.shape:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, need {tuple(logprobs.shape)}, one value a "
            f"response token. Spread one a response by batch[{name!r}] = batch.expand(values)."
        )
    return values
