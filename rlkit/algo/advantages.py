"""Advantages: rewards [B] and group_ids [B] in, one advantage a response [B] out.

A group is the responses of one prompt, told by id, so rows may lie in any order. All estimators
stand on ``group_statistics``; another one is a few lines over it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

Spread = Callable[[Tensor, Tensor], Tensor]
"""(sum of squared deviations [G], number of rewards [G]) -> spread of each group [G]."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Facts of B rewards in G groups, in float64; NaN and infinite rewards count in none."""

    index: Tensor
    """[B] int64, the group of each reward, 0 to G − 1."""
    valid: Tensor
    """[B] bool, whether the reward counts."""
    count: Tensor
    """[G] int64, rewards that count."""
    mean: Tensor
    """[G], 0 where none counts."""
    deviations: Tensor
    """[B], reward minus the mean of its group, 0 where not valid."""
    squares: Tensor
    """[G], sum of squared deviations."""
    span: Tensor
    """[G], largest minus smallest reward; −inf where none counts."""


def group_statistics(
    rewards: Shaped[Tensor, " B"], group_ids: Int[Tensor, " B"]
) -> GroupStatistics:
    """Count, mean, deviations and span of each group; rewards [B], group_ids [B], in any order.

    Rewards that are not finite (a verifier that failed) leave their group and don't touch the
    others in it.
    """
    _check_rewards(rewards)
    _check_ids(group_ids, rewards)
    ids, index = _unique(group_ids)
    valid = rewards.isfinite()
    x = torch.where(valid, rewards.double(), 0.0)
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=rewards.device)  # [G]
    count = torch.zeros_like(ids, dtype=torch.int64).index_add_(0, index, valid.long())
    mean = zeros.index_add(0, index, x) / count.clamp(min=1)
    deviations = torch.where(valid, x - mean[index], 0.0)
    largest, smallest = torch.full_like(zeros, -torch.inf), torch.full_like(zeros, torch.inf)
    largest = largest.scatter_reduce(0, index[valid], x[valid], "amax")
    smallest = smallest.scatter_reduce(0, index[valid], x[valid], "amin")
    return GroupStatistics(
        index=index,
        valid=valid,
        count=count,
        mean=mean,
        deviations=deviations,
        squares=zeros.index_add(0, index, deviations**2),
        span=largest - smallest,
    )


def unbiased_std(squares: Float[Tensor, " G"], count: Int[Tensor, " G"]) -> Float[Tensor, " G"]:
    """Root of squares / (n − 1), the sample standard deviation; 0 for n < 2. All [G]."""
    return (squares / (count - 1).clamp(min=1)).sqrt()


def population_std(squares: Float[Tensor, " G"], count: Int[Tensor, " G"]) -> Float[Tensor, " G"]:
    """Root of squares / n; 0 for an empty group. All [G]."""
    return (squares / count.clamp(min=1)).sqrt()


def group_relative(
    rewards: Shaped[Tensor, " B"],
    group_ids: Int[Tensor, " B"],
    *,
    std: Spread | None = unbiased_std,
    eps: float = 1e-6,
    tol: float = 1e-6,
) -> Float[Tensor, " B"]:
    """(reward − mean of its group) / (std of its group + eps).

    GRPO with outcome rewards (DeepSeekMath, 2402.03300, 2024, section 4.1). rewards [B] of any
    number type, group_ids [B] in any order -> advantages [B] in the dtype of rewards (float32 for
    integers). std is a function of (squares [G], count [G]), or None for no division.

    Exactly 0 in groups whose rewards span at most tol (equal but for rounding) and in groups of
    one. A reward that is not finite gets 0 and leaves its group. Rows with advantage 0 stay in loss
    and denominator; ``batch.select(has_signal(rewards, group_ids))`` takes groups without signal
    out of both.
    """
    groups = group_statistics(rewards, group_ids)
    advantages = _deviations(groups, tol)
    if std is not None:
        advantages = advantages / (std(groups.squares, groups.count) + eps)[groups.index]
    return _like(advantages, rewards)


def dr_grpo(
    rewards: Shaped[Tensor, " B"], group_ids: Int[Tensor, " B"], *, tol: float = 1e-6
) -> Float[Tensor, " B"]:
    """reward − mean of its group: ``group_relative`` without the division.

    Dr. GRPO (2503.20783, 2025): a division by the std favours prompts that are nearly always or
    nearly never solved. Its other half is in the loss, ``seq_mean_token_sum`` with one length for
    all. rewards [B], group_ids [B] -> [B]; zeros as in ``group_relative``.
    """
    return group_relative(rewards, group_ids, std=None, tol=tol)


def rloo(
    rewards: Shaped[Tensor, " B"], group_ids: Int[Tensor, " B"], *, tol: float = 1e-6
) -> Float[Tensor, " B"]:
    """reward − mean of the *other* rewards of its group, n / (n − 1) times ``dr_grpo``'s.

    RLOO (2402.14740, 2024): a baseline that does not depend on the response leaves the gradient
    unbiased. rewards [B], group_ids [B] -> [B]; zeros as in ``group_relative``.
    """
    groups = group_statistics(rewards, group_ids)
    scale = groups.count / (groups.count - 1).clamp(min=1)  # [G]
    return _like(_deviations(groups, tol) * scale[groups.index], rewards)


def reinforce_pp(
    rewards: Shaped[Tensor, " B"],
    group_ids: Int[Tensor, " B"] | None = None,
    *,
    std: Spread = population_std,
    eps: float = 1e-8,
    tol: float = 1e-6,
) -> Float[Tensor, " B"]:
    """(reward − baseline) / (std over the batch of that difference + eps).

    REINFORCE++ (2501.03262, 2025). Without group_ids the baseline is the mean of the batch; with
    them it is the mean of the response's group, the paper's variant with a group baseline. Either
    way one std for all, so a group of small spread is not blown up. With the KL in the reward:
    ``whiten(gae(token_rewards, zeros, response_mask)[0], response_mask)``, over tokens.

    rewards [B], group_ids [B] -> [B]. The rewards must be those of the whole step, not of a shard.
    Zeros as in ``group_relative``, the batch being one group where there are no ids.
    """
    _check_rewards(rewards)
    whole = torch.zeros_like(rewards, dtype=torch.int64)
    groups = group_statistics(rewards, whole if group_ids is None else group_ids)
    deviations = _deviations(groups, tol)
    spread = std(deviations.square().sum()[None], groups.count.sum()[None])  # [1]
    return _like(deviations / (spread + eps), rewards)


def has_signal(
    rewards: Shaped[Tensor, " B"], group_ids: Int[Tensor, " B"], *, tol: float = 1e-6
) -> Bool[Tensor, " B"]:
    """Whether the rewards of a response's group span more than tol.

    The filter of DAPO (2503.14476, 2025); rewards [B], group_ids [B] -> [B]. Pass the accuracy,
    before any shaping: a length penalty gives spread to a group that is all wrong.
    """
    groups = group_statistics(rewards, group_ids)
    return (groups.span > tol)[groups.index]


def group_metrics(
    rewards: Shaped[Tensor, " B"], group_ids: Int[Tensor, " B"], *, tol: float = 1e-6
) -> dict[str, Tensor]:
    """What ``group_relative`` sets to 0: failed rewards, groups of one, groups without signal.

    rewards [B], group_ids [B] -> 0-d tensors: two counts, and the share of groups with signal.
    """
    groups = group_statistics(rewards, group_ids)
    return {
        "group/num_failed_rewards": (~groups.valid).sum(),
        "group/num_single": (groups.count == 1).sum(),
        "group/signal_fraction": (groups.span > tol).sum() / max(len(groups.span), 1),
    }


def _deviations(groups: GroupStatistics, tol: float) -> Tensor:
    """Rewards minus the mean of their group [B], exactly 0 in groups that span at most tol."""
    return torch.where((groups.span > tol)[groups.index], groups.deviations, 0.0)


def _like(advantages: Tensor, rewards: Tensor) -> Tensor:
    """In the dtype of rewards, float32 for integers."""
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _unique(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted ids [G], and the place among them of each row's id [B]."""
    ids, index = torch.unique(group_ids, return_inverse=True)  # pyright: ignore
    return ids, index  # pyright: ignore


def _check_rewards(rewards: object) -> None:
    if not isinstance(rewards, Tensor) or rewards.is_complex():
        kind = rewards.dtype if isinstance(rewards, Tensor) else type(rewards).__name__
        raise TypeError(
            f"rewards: got {kind}, need a tensor of real numbers. Pass batch['rewards'], "
            "or torch.tensor(rewards)."
        )
    if rewards.ndim != 1:
        raise ValueError(
            f"rewards: got shape {tuple(rewards.shape)}, need [B], one number a response. "
            "Sum token rewards over the response mask first."
        )


def _check_ids(group_ids: object, rewards: Tensor) -> None:
    if not isinstance(group_ids, Tensor) or group_ids.is_floating_point() or group_ids.is_complex():
        kind = group_ids.dtype if isinstance(group_ids, Tensor) else type(group_ids).__name__
        raise TypeError(
            f"group_ids: got {kind}, need a tensor of integers. "
            "Pass batch['group_ids'] of the batch that was scored."
        )
    if group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids: got shape {tuple(group_ids.shape)}, need [{len(rewards)}], one id a "
            "reward. Pass batch['group_ids'] of the batch that was scored."
        )
