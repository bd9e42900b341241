"""Losses with one ratio a response: the geometric mean of the ratios of its tokens."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, seq_mean_token_mean
from rlkit.algo.losses.clipped import clipped
from rlkit.algo.losses.ratios import (
    check_clip,
    masked_advantages,
    masked_log_ratio,
    policy_metrics,
    row_mean,
)
from rlkit.algo.ratio import ratio_of


def gspo_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: int | float = 3e-4,
    clip_high: int | float = 4e-4,
    aggregate: Aggregate = seq_mean_token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate of max(−sA, −clip(s, 1 − clip_low, 1 + clip_high) A), s one ratio a response.

    s = exp(mean over the tokens of logprobs − old_logprobs): the clip keeps or holds back whole
    responses (GSPO, 2507.18071, 2025; the bounds are the paper's, some hundred times tighter than
    a token's). Written a token (the paper's GSPO-token): each has the value s and the gradient s,
    so advantages may differ within a response.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch.
    """
    check_clip(clip_low, clip_high)
    log_ratio = masked_log_ratio(logprobs, batch)  # [B, T]
    mean = row_mean(log_ratio.detach(), batch["response_mask"])[:, None]  # [B, 1]
    ratio = ratio_of(log_ratio - log_ratio.detach() + mean)  # [B, T], s on each token
    losses, held = clipped(
        ratio, masked_advantages(logprobs, batch), clip_low=clip_low, clip_high=clip_high
    )
    loss = aggregate(losses, batch)
    return loss, policy_metrics(loss, log_ratio, batch, held=held)


def gmpo_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: int | float = 0.4,
    clip_high: int | float = 0.4,
    aggregate: Aggregate = seq_mean_token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate of −A exp(mean over tokens of the clipped log-ratio).

    The geometric mean of a response's ratios, each first clipped to at most exp(clip_high) where
    its advantage is positive, and to at least exp(−clip_low) where it isn't (GMPO, 2507.20673,
    2025). One outlier moves a geometric mean far less than a sum; a clipped token loses its own
    gradient and no other's. clip_low and clip_high bound the *logarithm* of the ratio. A is the
    mean of the response's advantages.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch.
    """
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(
            f"clip_low, clip_high: got {clip_low}, {clip_high}; need both >= 0: ratios stay "
            "between exp(-clip_low) and exp(clip_high)."
        )
    mask = batch["response_mask"]
    advantages = masked_advantages(logprobs, batch)
    log_ratio = masked_log_ratio(logprobs, batch)  # [B, T]
    up = advantages > 0
    bounded = torch.where(up, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    losses = -row_mean(advantages, mask) * ratio_of(row_mean(bounded, mask))  # [B]
    loss = aggregate(losses[:, None].expand_as(log_ratio), batch)
    held = (advantages != 0) & (bounded != log_ratio)
    return loss, policy_metrics(loss, log_ratio, batch, held=held)
