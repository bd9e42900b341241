"""Losses that weigh every token's gradient and cut none."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, seq_mean_token_mean, token_mean
from rlkit.algo.losses.ratios import (
    check_clip,
    masked_advantages,
    masked_log_ratio,
    policy_metrics,
)
from rlkit.algo.ratio import ratio_of


def cispo_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip_low: int | float = 1.0,
    clip_high: int | float = 0.2,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate over tokens of −sg(clip(ρ, 1 − clip_low, 1 + clip_high)) A log π.

    REINFORCE whose importance weight ρ = exp(logprobs − old_logprobs) is clipped and constant (sg:
    no gradient), so a clipped token still has the gradient of its weight (CISPO in MiniMax-M1,
    2506.13585, 2025). clip_low = 1 is no lower bound. The value says little: log π is in it.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch.
    """
    check_clip(clip_low, clip_high)
    log_ratio = masked_log_ratio(logprobs, batch)  # [B, T]
    ratio = ratio_of(log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = masked_advantages(logprobs, batch)
    on_tokens = torch.where(batch["response_mask"].bool(), logprobs, 0.0)
    loss = aggregate(-weight * advantages * on_tokens, batch)
    return loss, policy_metrics(loss, log_ratio, batch, held=weight != ratio)


def sapo_loss(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    tau_positive: int | float = 1.0,
    tau_negative: int | float = 1.05,
    aggregate: Aggregate = seq_mean_token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Aggregate over tokens of −(4 / τ) sigmoid(τ (ρ − 1)) A.

    ρ = exp(logprobs − old_logprobs); τ is tau_positive where A > 0, else tau_negative, which is the
    larger, for pushing a token down spreads over the whole vocabulary (SAPO, 2511.20347, 2025).
    The gradient is that of −ρA times a gate 4p(1 − p), p the sigmoid: 1 on-policy, falling smoothly
    on both sides and faster for a larger τ.

    logprobs [B, T]; reads old_logprobs and advantages [B, T] of the batch.
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(
            f"tau_positive, tau_negative: got {tau_positive}, {tau_negative}; need both above 0. "
            "A small one leaves -ratio * advantage nearly as it is."
        )
    advantages = masked_advantages(logprobs, batch)
    log_ratio = masked_log_ratio(logprobs, batch)  # [B, T]
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = (tau * (ratio_of(log_ratio) - 1)).sigmoid()
    loss = aggregate(-4 / tau * gate * advantages, batch)
    metrics = policy_metrics(loss, log_ratio, batch)
    gate = gate.detach()
    metrics["policy/gate_mean"] = batch.token_mean(4 * gate * (1 - gate))
    return loss, metrics
