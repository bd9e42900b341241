"""What the losses share: columns shaped as the logprobs, ratios to the old policy, metrics."""

import torch
from torch import Tensor

from rlkit.algo.aggregate import LossBatch
from rlkit.algo.kl import kl_k3
from rlkit.algo.masking import masked_sum
from rlkit.algo.ratio import MAX_LOG_RATIO


def column_like(name: str, x: Tensor, batch: LossBatch) -> Tensor:
    """A column of the batch that must be shaped as x: broadcasting would hide a mistake."""
    values: Tensor = batch[name]
    if values.shape != x.shape:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, need {tuple(x.shape)}, one value a "
            f"response token. Spread one a response by batch[{name!r}] = batch.expand(values)."
        )
    return values


def masked_advantages(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """Advantages [B, T], 0 where the mask is 0."""
    advantages = column_like("advantages", logprobs, batch)
    return torch.where(batch["response_mask"].bool(), advantages, 0.0)


def masked_log_ratio(logprobs: Tensor, batch: LossBatch) -> Tensor:
    """logprobs − old_logprobs [B, T], 0 where the mask is 0.

    Masked before exp: an overflow under the mask would send back 0 * inf = NaN.
    """
    old = column_like("old_logprobs", logprobs, batch)
    return torch.where(batch["response_mask"].bool(), logprobs - old, 0.0)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row of x [B, T] over the tokens of a mask [B, T]; 0 without any: [B]."""
    return masked_sum(x, mask) / mask.bool().sum(1).clamp(min=1)


def policy_metrics(
    loss: Tensor, log_ratio: Tensor, batch: LossBatch, *, held: Tensor | None = None
) -> dict[str, Tensor]:
    """The loss, how far the policy has gone from the old one, and the share of tokens held [B, T].

    log_ratio [B, T], 0 where the mask is 0.
    """
    log_ratio = log_ratio.detach().clamp(max=MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    on_tokens = torch.where(batch["response_mask"].bool(), ratio, 0.0)
    metrics = {
        "policy/ratio_mean": batch.token_mean(ratio),
        "policy/ratio_max": on_tokens.amax() if on_tokens.numel() else on_tokens.sum(),
        # KL(old || new), for the old policy sampled: k3 with the old policy first
        "policy/kl_old": batch.token_mean(kl_k3(torch.zeros_like(log_ratio), log_ratio)),
        "policy/loss": loss.detach(),
    }
    if held is not None:
        metrics["policy/clip_fraction"] = batch.token_mean(held.to(ratio.dtype))
    return metrics


def check_clip(
    clip_low: int | float, clip_high: int | float, dual_clip: int | float | None = None
) -> None:
    """ValueError for bounds that do not hold the ratio 1 between them."""
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
