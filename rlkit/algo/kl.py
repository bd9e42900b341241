"""Per-token estimators of KL(policy || reference) from the logprobs of sampled tokens.

Schulman, "Approximating KL divergence" (2020). For tokens that the policy sampled, with
d = ref_logprobs − logprobs:

==================  ===============  =========================  =================================
estimator           value            mean of the value          mean of the gradient
==================  ===============  =========================  =================================
k1                  −d               the KL                     0: as a loss it does nothing
k2                  d² / 2           near the KL for small d    that of the KL
k3                  exp(d) − 1 − d   the KL; never negative     that of KL(reference || policy)
k3, gradient of k2  exp(d) − 1 − d   the KL; never negative     that of the KL
==================  ===============  =========================  =================================

The last column is for the plain average over samples, as a loss takes it, on-policy. Weighted by
the differentiable ratio π / π_old, k3 has the KL's gradient too.

No gradient is clamped: a token at logprobs − ref_logprobs = −3 has k3 = 16.09 with gradient
−19.09, the pull back that a clamp on the value would cut. Only exp(d) is held to e^20, so that fp32
does not overflow, and its gradient goes on (``ratio.py``).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.algo.ratio import bounded


def kl_k1(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log π − log π_ref: unbiased, noisy, negative for some tokens; [B, T] each -> [B, T].

    For measuring, or inside the reward. As a loss its expected gradient is 0.
    """
    return logprobs - ref_logprobs


def kl_k2(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """(log π − log π_ref)² / 2: biased in value, right in its gradient; [B, T] each -> [B, T]."""
    return (logprobs - ref_logprobs).square() / 2


def kl_k3(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """exp(d) − 1 − d with d = log π_ref − log π: unbiased, never negative; [B, T] each -> [B, T].

    GRPO's penalty (DeepSeekMath, 2402.03300, 2024, equation 4). Alone, as a loss, its expected
    gradient is that of KL(reference || policy); see the table above.
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(bounded(difference)) - difference


def kl_k3_with_k2_gradient(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Value of k3, gradient of k2 (straight-through): reads as the KL and pulls as the KL.

    [B, T] each -> [B, T].
    """
    k2 = kl_k2(logprobs, ref_logprobs)
    return kl_k3(logprobs, ref_logprobs).detach() + (k2 - k2.detach())


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveKL:
    """A coefficient of the KL that follows the KL that was observed (Ziegler et al., 1909.08593,
    2019, section 2.2).

    The loop keeps it: ``kl = kl.after(metrics["policy/kl_ref"], num=len(batch))``, and the next
    step's loss or reward takes ``kl.coef``. Nothing changes in place, so a copy that travelled to a
    worker is never the one that counts.
    """

    target: int | float
    """KL to hold, in nats, as the observed one is measured: a token's or a response's."""
    horizon: int | float
    """Responses over which a KL off by a fifth or more moves the coefficient by about a fifth."""
    coef: int | float
    """Coefficient of now."""

    def __post_init__(self) -> None:
        for name in ("target", "horizon", "coef"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: got {getattr(self, name)}, need more than 0.")

    def after(self, kl: int | float, num: int) -> "AdaptiveKL":
        """The coefficient after ``num`` responses that had ``kl``."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        factor = 1 + error * min(num / self.horizon, 1)  # 1: a step beyond it must not turn it over
        return replace(self, coef=self.coef * factor)
