"""Terms to add to a policy loss: (scalar, metrics) as a loss returns them."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.aggregate import Aggregate, LossBatch, token_mean
from rlkit.algo.kl import kl_k3_with_k2_gradient
from rlkit.algo.losses.ratios import column_like

Estimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs [B, T], ref_logprobs [B, T]) -> KL [B, T]."""


def kl_penalty(
    logprobs: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    coef: int | float,
    estimator: Estimator = kl_k3_with_k2_gradient,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """coef × aggregate of the KL from the reference: a term that pulls back to it.

    estimator: one of ``kl_k1`` (no gradient in the mean: measures only), ``kl_k2``, ``kl_k3``
    (GRPO's, 2402.03300, 2024, equation 4) or the default, the value of k3 with the gradient of the
    KL; `rlkit.algo.kl` has the table. For the KL in the reward see ``kl_penalised_rewards``.

    logprobs [B, T]; reads ref_logprobs [B, T] of the batch.
    """
    ref = column_like("ref_logprobs", logprobs, batch)
    mask = batch["response_mask"].bool()  # before exp: an overflow would send back 0 * inf = NaN
    kl = estimator(torch.where(mask, logprobs, 0.0), torch.where(mask, ref, 0.0))
    return coef * aggregate(kl, batch), {"policy/kl_ref": batch.token_mean(kl.detach())}


def entropy_bonus(
    entropy: Float[Tensor, "B T"],
    batch: LossBatch,
    *,
    coef: int | float,
    aggregate: Aggregate = token_mean,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """−coef × aggregate of the entropy: a term that keeps the policy from settling too early.

    entropy [B, T] in nats, what a loss gets that names a third parameter ``entropy`` (PPO,
    1707.06347, 2017, equation 9).
    """
    loss = -coef * aggregate(entropy, batch)
    return loss, {"policy/entropy": batch.token_mean(entropy.detach())}
