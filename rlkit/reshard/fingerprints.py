"""Fingerprints of tensors: an integer over the bits, so that copies can be compared from afar."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ODD = 0x2545F4914F6CDD1D
_ROWS, _COLUMNS = 32, 2048  # words of 8 bytes: half a megabyte at a time stays in a core's cache


def fingerprint(tensor: Tensor) -> int:
    """64-bit sum over the words of a tensor's bits, each times a factor of its position.

    Equal tensors have equal ones. The factors are odd, so changing one word always changes the sum.
    Those of zeros are not 0: a buffer that nobody wrote to must not agree with itself.
    """
    return int(fingerprint_tensor(tensor))


def fingerprint_tensor(tensor: Tensor) -> Tensor:
    """``fingerprint`` as a 0-d int64 tensor on the tensor's device, which is not waited for."""
    words, level = _words(tensor), 0
    length = len(words)
    while len(words) > 1 or not level:
        words, level = _folded(words, level), level + 1
    return words[0] + (_ODD + length)


def fingerprints_packed(flat: Tensor, sizes: Sequence[int]) -> Tensor:
    """One for each of several small pieces of ``sizes`` words that lie end to end in ``flat``
    [bytes], [pieces]: a few operations for all of them.
    """
    rows, columns = _factors(flat.device, 0)
    factors = (rows[:, None] + columns).view(-1)
    assert max(sizes) <= len(factors), max(sizes)
    chunks = flat.view(torch.int64).split(len(factors))
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


def _folded(words: Tensor, level: int) -> Tensor:
    """A word for each block of rows and columns, the sum of its own times their factors.

    A factor is that of the row plus that of the column, so the words are only added up: twice as
    quick as multiplying each.
    """
    rows, columns = _factors(words.device, level)
    sums = []
    for chunk in words.split(_ROWS * _COLUMNS):
        num, left = divmod(len(chunk), _COLUMNS)
        block, rest = chunk[: num * _COLUMNS].view(num, _COLUMNS), chunk[num * _COLUMNS :]
        total = (block.sum(0) * columns).sum() + (block.sum(1) * rows[:num]).sum()
        if left:
            total = total + (rest * (rows[num] + columns[:left])).sum()
        sums.append(total)
    return torch.stack(sums)


@cache
def _factors(device: Any, level: int) -> tuple[Tensor, Tensor]:
    """Even ones [rows] and odd ones [columns]; each level has others, or a word of block i at j
    would be as good as one of block j at i.
    """
    generator = torch.Generator().manual_seed(_ODD + level)
    half = 1 << 62
    rows, columns = (
        2 * torch.randint(-half, half, (size,), generator=generator).to(device)
        for size in (_ROWS, _COLUMNS)
    )
    return rows, columns + 1
