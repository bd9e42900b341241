"""Losses: (logprobs [B, T], batch) -> (scalar, dict of 0-d tensors), and terms to add to them.

Scalars and metrics add up over micro-batches and data-parallel ranks, as ``batch.token_mean`` makes
them; metrics that end in ``_max`` reduce by the largest. Nothing here waits for the device.
"""

from rlkit.algo.losses.clipped import clipped_policy_loss, decoupled_policy_loss
from rlkit.algo.losses.gated import cispo_loss, sapo_loss
from rlkit.algo.losses.sequence import gmpo_loss, gspo_loss
from rlkit.algo.losses.terms import entropy_bonus, kl_penalty
from rlkit.algo.losses.value import clipped_value_loss

__all__ = [
    "cispo_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "decoupled_policy_loss",
    "entropy_bonus",
    "gmpo_loss",
    "gspo_loss",
    "kl_penalty",
    "sapo_loss",
]
