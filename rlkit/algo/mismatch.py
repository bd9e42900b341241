"""How far the trainer's logprobs are from the engine's, which sampled the tokens."""

import torch
from torch import Tensor

from rlkit.algo.aggregate import LossBatch
from rlkit.algo.kl import kl_k3
from rlkit.algo.losses.ratios import column_like
from rlkit.algo.ratio import ratio_of

RATIO_EDGES = (0.5, 0.9, 0.99, 1.01, 1.1, 2.0)
"""Borders of the bins that tokens are counted in by their ratio."""
RATIO_BINS = (
    "mismatch/ratio_below_0.5_fraction",
    "mismatch/ratio_0.5_to_0.9_fraction",
    "mismatch/ratio_0.9_to_0.99_fraction",
    "mismatch/ratio_0.99_to_1.01_fraction",
    "mismatch/ratio_1.01_to_1.1_fraction",
    "mismatch/ratio_1.1_to_2_fraction",
    "mismatch/ratio_above_2_fraction",
)
"""Metric of each bin; a ratio on a border is in the bin below it."""


def mismatch_metrics(batch: LossBatch) -> dict[str, Tensor]:
    """Metrics of d = old_logprobs − rollout_logprobs [B, T]: |d| on average and at most, the KL of
    the trainer's policy from the engine's, and the share of tokens by ratio exp(d), which add up
    to 1.

    With the weights of the sampling still in the trainer, d is what kernels and number formats
    make of them (Yao et al., 2025); later it has staleness in it, too. Nothing of it is repaired
    here: the weights of ``rlkit.algo.correction`` do that. Shares of means, as a loss's metrics.
    """
    mask = batch["response_mask"].bool()
    rollout = batch["rollout_logprobs"]
    difference = torch.where(mask, column_like("old_logprobs", rollout, batch) - rollout, 0.0)
    size, ratio = difference.abs(), ratio_of(difference)
    bins = torch.bucketize(ratio, torch.tensor(RATIO_EDGES, device=ratio.device))
    counts = {name: bins == i for i, name in enumerate(RATIO_BINS)}
    return {
        "mismatch/logprob_mean": batch.token_mean(size),
        "mismatch/logprob_max": size.amax() if size.numel() else size.sum(),
        # KL(engine || trainer), for the engine sampled: k3 with the engine's policy first
        "mismatch/kl": batch.token_mean(kl_k3(torch.zeros_like(difference), difference)),
        **{name: batch.token_mean(found.to(ratio.dtype)) for name, found in counts.items()},
    }
