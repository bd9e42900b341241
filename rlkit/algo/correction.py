"""Importance weights for samples of another policy: old (trainer, now) over rollout (engine, then).

The engine that samples and the trainer differ by staleness, numerics and kernels. A weight w ≥ 0
multiplies the advantages, ``batch["advantages"] * w``, of any loss here, or is the ``weight=`` of
``decoupled_policy_loss``.

All take (old_logprobs, rollout_logprobs, response_mask) [B, T] and return [B, T]: detached, 0 where
the mask is 0. Tokens that get 0 under the mask stay in the loss's denominator.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlkit.algo.masking import masked_sum
from rlkit.algo.ratio import ratio_of

Level = Callable[[Tensor, Tensor], Tensor]
"""(log-ratios [B, T], response_mask [B, T]) -> log-weights [B, T]."""

Weight = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(old_logprobs, rollout_logprobs, response_mask) [B, T] each -> weights [B, T]."""


def per_token(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """Each token its own weight: little variance, biased, for it ignores the tokens before."""
    return log_ratios


def per_sequence(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """The product over the response on each of its tokens: unbiased, of huge variance."""
    return masked_sum(log_ratios, mask)[:, None].expand_as(log_ratios)


def per_sequence_mean(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """The geometric mean over the response on each of its tokens: comparable over lengths."""
    return per_sequence(log_ratios, mask) / mask.bool().sum(1, keepdim=True).clamp(min=1)


def importance_weight(
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    level: Level = per_token,
) -> Float[Tensor, "B T"]:
    """exp(old_logprobs − rollout_logprobs), not capped below e^20.

    The weight of decoupled PPO (AReaL, 2505.24298, 2025, equation 5).
    """
    mask = response_mask.bool()
    log_ratios = torch.where(mask, (old_logprobs - rollout_logprobs).detach(), 0.0)
    return torch.where(mask, ratio_of(level(log_ratios, mask)), 0.0)


def truncated_importance_weight(
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    cap: int | float = 2.0,
    level: Level = per_token,
) -> Float[Tensor, "B T"]:
    """min(exp(old_logprobs − rollout_logprobs), cap).

    Truncated importance sampling (Ionides, 2008; for engine and trainer of one policy Yao et al.,
    2025): bounded variance for some bias.
    """
    _check_bounds(0.0, cap)
    weight = importance_weight(old_logprobs, rollout_logprobs, response_mask, level=level)
    return weight.clamp(max=cap)


def masked_importance_weight(
    old_logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    low: int | float = 0.0,
    high: int | float = 2.0,
    level: Level = per_token,
) -> Float[Tensor, "B T"]:
    """exp(old_logprobs − rollout_logprobs) where it lies in [low, high], else 0.

    What has drifted too far is left out in place of being clamped: AReaL's cap (2505.24298, 2025)
    by token, whole responses with a sequence's level.
    """
    _check_bounds(low, high)
    weight = importance_weight(old_logprobs, rollout_logprobs, response_mask, level=level)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)


def interpolated_logprobs(
    logprobs: Float[Tensor, "B T"],
    rollout_logprobs: Float[Tensor, "B T"],
    *,
    staleness_steps: Shaped[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """The proximal policy's logprobs without a forward pass, detached: between two known policies.

    rollout + (1 − 1/d) (logprobs − rollout), d the token's staleness in train steps: the policy one
    step before the current one, if logprobs moved evenly since the token was sampled. Tokens with
    d ≤ 1 keep the rollout's. For inside a loss, in place of recomputed old_logprobs (A-3PO,
    2512.06547, 2025; AReaL's ``loglinear``).
    """
    share = 1 - 1 / staleness_steps.to(logprobs.dtype).clamp(min=1)
    return torch.lerp(rollout_logprobs, logprobs, share).detach()


def _check_bounds(low: int | float, high: int | float) -> None:
    if not 0 <= low <= 1 <= high:
        raise ValueError(
            f"bounds of an importance weight: got {low} to {high}, need 0 <= low <= 1 <= high: a "
            "token on which both policies agree has the weight 1 and must be kept."
        )
