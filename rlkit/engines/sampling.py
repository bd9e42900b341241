"""Sampling noise as a function of (run seed, uid, position), and tokens from logits by it."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 256  # tokens whose probabilities are added up before any is looked at
_BELOW_ONE = 1 - 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014); uint64 in, uint64 out."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed_rows(seed: int, uids: np.ndarray) -> np.ndarray:
    """[B] uint64: a number for each uid [B] int64 of a run."""
    with np.errstate(over="ignore"):
        run = _mix(np.asarray([seed], dtype=np.int64).astype(np.uint64) + _GOLDEN)
        return _mix(run ^ (uids.astype(np.uint64) * _GOLDEN + np.uint64(1)))


def row_seeds(seed: int, uids: np.ndarray) -> np.ndarray:
    """A seed for each uid, [B] int64 from 0 up, for engines with generators of their own."""
    return (_mixed_rows(seed, uids) >> np.uint64(1)).astype(np.int64)


def noise(seed: int, uids: np.ndarray, num_positions: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, num_positions] float64: the same for a uid and position
    wherever it is sampled.

    uids [B] int64. Order of execution, number of workers and a resume therefore don't change what
    is sampled.
    """
    with np.errstate(over="ignore"):
        row = _mixed_rows(seed, uids)
        place = np.arange(1, num_positions + 1, dtype=np.uint64) * _GOLDEN  # [positions]
        bits = _mix(row[:, None] + place[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Cut(NamedTuple):
    """Where the tokens of each of B rows are cut off, as in ``SamplingParams``."""

    top_k: Tensor
    """[B] int64; 0 keeps all."""
    top_p: Tensor
    """[B] fp32; 1 keeps all."""
    min_p: Tensor
    """[B] fp32; 0 keeps all."""


def sample(
    logits: Tensor, temperature: Tensor, uniform: Tensor, cut: Cut | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 and their logprobs [B] fp32 from logits [B, V]; temperature, uniform [B].

    The token is where the cumulative probability of what ``cut`` leaves passes the uniform number.
    Temperature 0 takes the most likely token, with its logprob at temperature 1 (what a trainer
    computes for such rows). Logprobs are of the distribution before the cut.
    """
    greedy = temperature == 0
    scaled = logits.float()
    if not bool((greedy | (temperature == 1)).all()):
        scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None]
    weights = _in_blocks(scaled.softmax(-1))  # [B, blocks, block]
    mass = weights.sum(-1).double()  # [B, blocks]
    if bool(greedy.all()):
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        if cut is None:
            tokens = _pick(weights, mass, uniform)
        else:
            left = cut_off(weights.flatten(1), cut).view_as(weights)
            tokens = _pick(left, left.sum(-1), uniform)
        if bool(greedy.any()):
            tokens = torch.where(greedy[:, None], scaled.argmax(-1, keepdim=True), tokens)
    chosen = weights.flatten(1).gather(1, tokens).clamp_(min=torch.finfo(weights.dtype).tiny)
    logprobs = chosen.log() - mass.sum(-1, keepdim=True).log().float()  # of fp32's sum, almost 1
    return tokens[:, 0], logprobs[:, 0]


def _in_blocks(weights: Tensor) -> Tensor:
    """[B, V] as blocks [B, blocks, block]; 0 after the end."""
    size = weights.shape[1]
    block = min(size, _BLOCK)
    if size % block:
        weights = F.pad(weights, (0, -size % block))
    return weights.view(len(weights), -1, block)


def _pick(weights: Tensor, mass: Tensor, uniform: Tensor) -> Tensor:
    """Index [B, 1] into the flat weights [B, blocks, block] where the sum passes ``uniform`` of
    the whole: first the block, by the sums ``mass`` [B, blocks], then the token in it.
    """
    inside, first = uniform[:, None], 0
    if weights.shape[1] > 1:
        block, inside = _passing(mass, inside)
        first = block * weights.shape[2]
        weights = weights.gather(1, block[:, :, None].expand(-1, -1, weights.shape[2]))
    return first + _passing(weights[:, 0], inside)[0]


def _passing(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of weights [B, N] passes ``uniform`` [B, 1] of the whole: the index
    [B, 1], and which share of that weight lies before that point [B, 1].
    """
    cumulative = weights.double().cumsum(-1)
    target = uniform * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    before = cumulative.gather(1, index) - weight
    return index, ((target - before) / weight).clamp_(0, _BELOW_ONE)


def cut_off(weights: Tensor, cut: Cut) -> Tensor:
    """Weights [B, V] with 0 for tokens that are cut off: by min_p, of the rest by top_k, of the
    rest by top_p, as vLLM does.

    min_p: below that share of the highest probability (Nguyen et al., 2024). top_k: not among the k
    most likely (Fan et al., 2018). top_p: not in the smallest set of most likely tokens that has a
    share p (Holtzman et al., 2020). Of equals the lower token ids stay.
    """
    rows = ((cut.top_k > 0) | (cut.top_p < 1) | (cut.min_p > 0)).nonzero()[:, 0]
    top_k, top_p, min_p = (limit[rows, None] for limit in cut)
    ordered, index = weights[rows].sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[1], device=weights.device)
    ordered = ordered * ((ordered >= min_p * ordered[:, :1]) & ((rank < top_k) | (top_k == 0)))
    mass = ordered.double().cumsum(-1)
    ordered = ordered * (mass - ordered < top_p * mass[:, -1:])
    return weights.index_copy(0, rows, torch.empty_like(ordered).scatter_(1, index, ordered))
