"""Logprobs and entropies of tokens whose logits lie in pieces on tensor-parallel ranks.

No rank ever has a whole row of logits: a maximum and sums of [M] numbers travel. ``total`` adds up
over ranks, forward only: every rank goes on with the same numbers and makes the same loss of them,
so the gradient of a rank's part is that of the sum (Megatron-LM, 1909.08053, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where a rank's columns begin, how many of all ranks' are real, and how ranks reduce."""

    first: int
    """Vocabulary index of this rank's first column."""
    vocab_size: int
    """V without padding; columns from there on do not exist."""
    total: Callable[[Tensor], Tensor]
    """Sum over ranks; the gradient goes through unchanged."""
    highest: Callable[[Tensor], Tensor]
    """Maximum over ranks, of what has no gradient."""


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: Tensor, ranks: Ranks, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs [M] of targets [M], and entropies [M] if asked for, else none, on every rank.

    logits [M, columns] of this rank; temperature [M] divides them, 0 counts as 1 as in
    ``algo.logprobs_from_logits``.
    """
    safe = torch.where(temperature == 0, 1.0, temperature)
    scaled = logits.float() / safe[:, None]
    num = logits.shape[1]
    columns = torch.arange(ranks.first, ranks.first + num, device=logits.device)
    # Not -inf: a rank may have padding only, and 0 * -inf is NaN.
    scaled = scaled.masked_fill(columns >= ranks.vocab_size, torch.finfo(scaled.dtype).min)
    top = ranks.highest(scaled.detach().amax(-1))  # [M]
    weights = (scaled - top[:, None]).exp()
    normaliser = ranks.total(weights.sum(-1))  # [M]
    mine = (targets >= ranks.first) & (targets < ranks.first + num)
    place = (targets - ranks.first).clamp(0, num - 1)
    own = scaled.gather(-1, place[:, None])[:, 0]
    chosen = ranks.total(torch.where(mine, own, torch.zeros_like(own)))
    log_normaliser = top + normaliser.log()
    logprobs = chosen - log_normaliser
    if not entropy:
        return logprobs, logprobs.new_zeros(0)
    mean = ranks.total((weights * scaled).sum(-1)) / normaliser
    return logprobs, log_normaliser - mean
