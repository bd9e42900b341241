"""Fingerprints of tensors: an integer over the bits, so that copies can be compared from afar."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

_ODD = 0x2545F4914F6CDD1D
_ROWS, _COLUMNS = 32, 251  # words of 8 bytes; a prime, for rows of matrices are no multiple of it
_NUM_FACTORS = 1 << 15


def fingerprint(tensor: Tensor) -> int:
    """64-bit sum over the words of a tensor's bits, each times a factor of its position.

    Equal tensors have equal ones. The factors are odd, so changing one word always changes the sum.
    Those of zeros are not 0: a buffer that nobody wrote to must not agree with itself.
    """
    return int(fingerprint_tensor(tensor))


def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """``fingerprint`` as a 0-d int64 tensor on the tensor's device, which is not waited for.

    Bits are read once, as fast as memory is: words in one column of a block are added up, and the
    sums multiplied. Words that changed places in a column, 2008 bytes apart, are not noticed.
    """
    return fingerprint_rows(words_of(tensor)[None])[0]


def fingerprint_rows(words: Tensor) -> Tensor:
    """One for each row of words [rows, words], [rows]: a few operations for all of them."""
    num, left = divmod(words.shape[1], _ROWS * _COLUMNS)
    blocks, rest = words.tensor_split((words.shape[1] - left,), 1)
    factors = _factors(words.device)
    total = (rest * factors[_NUM_FACTORS - left :]).sum(1) + (_ODD + words.shape[1])
    if num:
        sums = blocks.unflatten(1, (num, _ROWS, _COLUMNS)).sum(2)  # [rows, blocks, columns]
        steps = torch.arange(num, device=words.device)
        total += (sums * factors[:_COLUMNS].add(steps[:, None], alpha=2 * _ODD)).sum((1, 2))
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, flat and not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def words_of(tensor: Tensor) -> Tensor:
    """The bits as int64, the last word filled up with zeros."""
    flat = as_bytes(tensor.contiguous())
    if len(flat) % 8 or flat.storage_offset() % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    return flat.view(torch.int64)


@cache
def _factors(device: Any) -> Tensor:
    """Odd ones [_NUM_FACTORS]."""
    generator, half = torch.Generator().manual_seed(_ODD), 1 << 62
    return 2 * torch.randint(-half, half, (_NUM_FACTORS,), generator=generator).to(device) + 1
