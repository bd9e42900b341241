"""Reinforcement learning as pure functions on tensors: no state, no devices, no configuration.

B responses, T response tokens, V vocabulary, G groups. Entry t of a [B, T] tensor speaks of
response token t.
"""

from rlkit.algo.advantages import (
    GroupStatistics,
    dr_grpo,
    group_metrics,
    group_relative,
    group_statistics,
    has_signal,
    population_std,
    reinforce_pp,
    rloo,
    unbiased_std,
)
from rlkit.algo.aggregate import seq_mean_token_mean, seq_mean_token_sum, token_mean
from rlkit.algo.compare import compare_losses
from rlkit.algo.correction import (
    importance_weight,
    interpolated_logprobs,
    masked_importance_weight,
    per_sequence,
    per_sequence_mean,
    per_token,
    truncated_importance_weight,
)
from rlkit.algo.kl import AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient
from rlkit.algo.logprobs import (
    entropy_from_logits,
    logprobs_from_logits,
    next_token_rows,
    per_token_from_hidden,
)
from rlkit.algo.losses import (
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    decoupled_policy_loss,
    entropy_bonus,
    gmpo_loss,
    gspo_loss,
    kl_penalty,
    sapo_loss,
)
from rlkit.algo.masking import masked_sum, response_mask
from rlkit.algo.mismatch import RATIO_BINS, mismatch_metrics
from rlkit.algo.returns import gae, kl_penalised_rewards, last_token, moments, whiten
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
    "RATIO_BINS",
    "THINK_ANSWER",
    "AdaptiveKL",
    "GroupStatistics",
    "boxed_match",
    "cispo_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "compare_losses",
    "decoupled_policy_loss",
    "dr_grpo",
    "entropy_bonus",
    "entropy_from_logits",
    "exact_match",
    "format_reward",
    "gae",
    "gmpo_loss",
    "group_metrics",
    "group_relative",
    "group_statistics",
    "gspo_loss",
    "has_signal",
    "importance_weight",
    "interpolated_logprobs",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_with_k2_gradient",
    "kl_penalised_rewards",
    "kl_penalty",
    "last_boxed",
    "last_token",
    "logprobs_from_logits",
    "masked_importance_weight",
    "masked_sum",
    "mismatch_metrics",
    "moments",
    "next_token_rows",
    "number_match",
    "overlong_penalty",
    "per_sequence",
    "per_sequence_mean",
    "per_token",
    "per_token_from_hidden",
    "population_std",
    "reinforce_pp",
    "response_mask",
    "rloo",
    "sapo_loss",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "token_mean",
    "truncated_importance_weight",
    "unbiased_std",
    "whiten",
]
