"""Fingerprints of tensors: an integer over the bits, so that copies can be compared from afar."""

from collections.abc import Sequence
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
    words = _words(tensor)
    num, left = divmod(len(words), _ROWS * _COLUMNS)
    blocks, rest = words[: len(words) - left], words[len(words) - left :]
    sums = blocks.view(num, _ROWS, _COLUMNS).sum(1)  # [blocks, columns]
    factors, steps = _factors(words.device), torch.arange(num, device=words.device)
    total = (sums * (factors[:_COLUMNS] + 2 * _ODD * steps[:, None])).sum()
    return total + (rest * factors[_NUM_FACTORS - left :]).sum() + (_ODD + len(words))


def fingerprints_packed(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """One for each of several small pieces of ``sizes`` words that lie end to end in ``flat``
    [bytes], [pieces]: a few operations for all of them.
    """
    factors = _factors(flat.device)
    assert max(sizes) <= _NUM_FACTORS, max(sizes)
    chunks = flat.view(torch.int64).split(_NUM_FACTORS)
    totals = torch.cat([chunk * factors[: len(chunk)] for chunk in chunks]).cumsum(0)
    lengths = torch.tensor(sizes, device=flat.device)
    ends = totals[lengths.cumsum(0) - 1]
    return ends.diff(prepend=ends.new_zeros(1)) + (_ODD + lengths)


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's bytes, flat and not copied."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _words(tensor: Tensor) -> Tensor:
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
