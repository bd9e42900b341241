"""Reinforcement learning as pure functions on tensors: no state, no devices, no configuration.

B responses, T response tokens, V vocabulary, G groups. Entry t of a [B, T] tensor speaks of
response token t.
"""

from rlkit.algo.advantages import (
    GroupStatistics,
    group_metrics,
    group_relative,
    group_statistics,
    has_signal,
    population_std,
    unbiased_std,
)
from rlkit.algo.aggregate import seq_mean_token_mean, seq_mean_token_sum, token_mean
from rlkit.algo.kl import kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient
from rlkit.algo.logprobs import entropy_from_logits, logprobs_from_logits, next_token_rows
from rlkit.algo.losses import clipped_policy_loss
from rlkit.algo.masking import masked_sum, response_mask
from rlkit.algo.rewards import (
    THINK_ANSWER,
    boxed_match,
    exact_match,
    format_reward,
    last_boxed,
    number_match,
    overlong_penalty,
)

__all__ = [
    "THINK_ANSWER",
    "GroupStatistics",
    "boxed_match",
    "clipped_policy_loss",
    "entropy_from_logits",
    "exact_match",
    "format_reward",
    "group_metrics",
    "group_relative",
    "group_statistics",
    "has_signal",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_with_k2_gradient",
    "last_boxed",
    "logprobs_from_logits",
    "masked_sum",
    "next_token_rows",
    "number_match",
    "overlong_penalty",
    "population_std",
    "response_mask",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "token_mean",
    "unbiased_std",
]
