"""Sampling noise as a function of (run seed, uid, position), and tokens from logits by it."""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014); uint64 in, uint64 out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise(seed: int, uids: np.ndarray, num_positions: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, num_positions] float64: the same for a uid and position
    wherever it is sampled.

    uids [B] int64. Order of execution, number of workers and a resume therefore don't change what
    is sampled.
    """
    with np.errstate(over="ignore"):
        run = _mix(np.asarray([seed], dtype=np.int64).astype(np.uint64) + _GOLDEN)
        row = _mix(run ^ (uids.astype(np.uint64) * _GOLDEN + np.uint64(1)))  # [B]
        place = np.arange(1, num_positions + 1, dtype=np.uint64) * _GOLDEN  # [positions]
        bits = _mix(row[:, None] + place[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their logprobs [B] fp32 from logits [B, V]; temperature, uniform [B].

    The token is where the cumulative probability passes the uniform number. Temperature 0 takes the
    most likely token, with its logprob at temperature 1 (what a trainer computes for such rows).
    """
    greedy = temperature == 0
    scale = torch.where(greedy, torch.ones_like(temperature), temperature)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)  # [B, V]
    if bool(greedy.all()):
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        target = uniform[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
        if bool(greedy.any()):
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
