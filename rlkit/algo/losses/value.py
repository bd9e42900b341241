"""The critic's loss."""

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, token_mean
from rlkit.algo.losses.ratios import column_like


def clipped_value_loss(
    values: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    clip: int | float | None = 0.2,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Half the aggregate over tokens of max((v − R)², (clip(v, v_old ± clip) − R)²).

    v the critic's values now, v_old those of the batch, R the returns: a value that has come more
    than clip closer to R since v_old has no gradient (OpenAI Baselines' PPO2, 2017). None: no clip.

    values [B, T], not squeezed for T = 1; reads values and returns [B, T] of the batch.
    """
    if clip is not None and not clip > 0:
        raise ValueError(
            f"clip: got {clip}, need more than 0, in units of the returns, or None for no clip."
        )
    mask = batch["response_mask"].bool()
    old, returns = (column_like(name, values, batch) for name in ("values", "returns"))
    old, returns, now = (torch.where(mask, x, 0.0) for x in (old, returns, values))
    losses = (now - returns).square()
    held = torch.zeros_like(mask)
    if clip is not None:
        bounded = old + (now - old).clamp(-clip, clip)
        beyond = (bounded - returns).square()
        held = ((now - old).abs() > clip) & (beyond > losses)
        losses = torch.maximum(losses, beyond)
    loss = aggregate(losses, batch) / 2
    return loss, {
        "critic/loss": loss.detach(),
        "critic/clip_fraction": batch.token_mean(held.to(values.dtype)),
        "critic/value_mean": batch.token_mean(now.detach()),
        "critic/return_mean": batch.token_mean(returns),
    }
