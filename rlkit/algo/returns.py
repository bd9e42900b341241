"""Rewards a token [B, T] to advantages and returns [B, T], and whitening over the whole batch."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlkit.algo.masking import masked_sum


def kl_penalised_rewards(
    rewards: Shaped[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    coef: int | float,
) -> Float[Tensor, "B T"]:
    """−coef × kl on each trainable token, plus the reward on the last one.

    The KL in the reward (Ziegler et al., 1909.08593, 2019). rewards [B]; kl [B, T] of any estimator
    of ``rlkit.algo.kl``; response_mask [B, T] -> token rewards [B, T], 0 where the mask is 0:
    tokens of tools have no KL.
    """
    mask = response_mask.bool()
    _check_shape("kl", kl, mask)
    return last_token(rewards.to(kl.dtype), mask) + torch.where(mask, -coef * kl.detach(), 0.0)


def last_token(
    values: Shaped[Tensor, " B"], response_mask: Shaped[Tensor, "B T"]
) -> Shaped[Tensor, "B T"]:
    """values [B] on the last trainable token of each row, 0 elsewhere; mask [B, T] -> [B, T]."""
    mask = response_mask.bool()
    if mask.ndim != 2 or values.shape != mask.shape[:1]:  # broadcasting would hide it
        raise ValueError(
            f"values, response_mask: got shapes {tuple(values.shape)}, {tuple(mask.shape)}; need "
            "[B] and [B, T], one value a response. Pass columns of one batch."
        )
    after = mask.flip(1).cumsum(1).flip(1)  # trainable tokens from here on
    return torch.where(mask & (after == 1), values[:, None], torch.zeros_like(values[:, None]))


def gae(
    rewards: Shaped[Tensor, "B *T"],
    values: Float[Tensor, "B T"],
    response_mask: Shaped[Tensor, "B T"],
    *,
    gamma: int | float = 1.0,
    lam: int | float = 1.0,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimates (Schulman et al., 1506.02438, 2015).

    δ_t = r_t + γ V_t' − V_t and A_t = δ_t + γλ A_t', t' the next *trainable* token: tokens of tools
    and padding are skipped with their values and cost no discount. Past the last one both are 0.

    rewards [B], put on the last trainable token, or [B, T] (``kl_penalised_rewards``); values,
    response_mask [B, T]. Returns advantages and returns A + V, both [B, T], 0 where the mask is 0.
    A row with a reward that is not finite has advantage 0 and its values as returns; leave it out
    before whitening: ``batch.select(batch["rewards"].isfinite())``.
    """
    mask = response_mask.bool()
    if mask.shape != values.shape or rewards.shape not in (values.shape, values.shape[:1]):
        raise ValueError(
            f"rewards, response_mask: got shapes {tuple(rewards.shape)}, {tuple(mask.shape)}; need "
            f"{tuple(values.shape)} as the values, rewards perhaps [{len(values)}]. Pass columns "
            "of one batch."
        )
    if rewards.ndim == 1:
        rewards = last_token(rewards, mask)
    x = torch.where(mask, rewards.to(values.dtype), 0.0)  # [B, T]
    failed = ~x.isfinite().all(1, keepdim=True)
    values = torch.where(mask, values.detach(), 0.0)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = x[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lam * next_advantage
        next_advantage = torch.where(mask[:, t], advantages[:, t], next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
    advantages = torch.where(mask & ~failed, advantages, 0.0)
    return advantages, advantages + values


def moments(x: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, " 3"]:
    """Count, sum and sum of squares of x [B, T] under a mask [B, T], in float64: [3].

    Those of shards add up to those of the batch; an empty shard has three zeros to add.
    """
    _check_shape("x", x, mask)
    x = x.detach().double()
    return torch.stack([masked_sum(y, mask).sum() for y in (torch.ones_like(x), x, x.square())])


def whiten(
    x: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    *,
    total: Float[Tensor, " 3"] | None = None,
    eps: int | float = 1e-8,
    tol: int | float = 1e-6,
) -> Float[Tensor, "B T"]:
    """(x − mean) / (std + eps) over the tokens of the mask; x, mask [B, T] -> [B, T], 0 outside it.

    Mean and population std of the whole batch, long responses counting for more. Where x is only a
    shard of it, total is the sum of ``moments`` over all shards, empty ones too: a mean taken shard
    by shard would wipe out the difference between them. Exactly 0 if std is at most tol.
    """
    _check_shape("x", x, mask)
    count, first, second = moments(x, mask) if total is None else total
    mean = first / count.clamp(min=1)
    std = (second / count.clamp(min=1) - mean**2).clamp(min=0).sqrt()
    whitened = torch.where(std > tol, (x.double() - mean) / (std + eps), 0.0)
    return torch.where(mask.bool(), whitened, 0.0).to(x.dtype)


def _check_shape(name: str, x: Tensor, mask: Tensor) -> None:
    """ValueError unless x is shaped as the mask: broadcasting would hide a mistake."""
    if x.shape != mask.shape:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, need {tuple(mask.shape)} as the mask. Pass "
            "columns of one batch."
        )
