"""Fingerprints of tensors: two integers over the bits, so that copies can be compared from afar."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ODD = 0x2545F4914F6CDD1D  # an odd factor: changing one element always changes the weighted sum
_WORDS = 1 << 17  # of 8 bytes: a megabyte at a time stays in a processor's cache
_MASK = (1 << 64) - 1


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two 64-bit sums over the words of a tensor's bits, plain and weighted by position.

    Equal tensors have equal ones. Those of zeros are not 0: a buffer that nobody wrote to must not
    agree with itself.
    """
    words = _words(tensor)
    plain = weighted = _ODD + len(words)
    for chunk in words.split(_WORDS):
        plain += int(chunk.sum())
        here = int((chunk * _weights(chunk.device)[: len(chunk)]).sum())
        weighted = weighted * _ODD + here & _MASK
    return _signed(plain), _signed(weighted)


def fingerprints(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Fingerprint of each named tensor."""
    return {name: fingerprint(tensor) for name, tensor in weights.items()}


def compare(expected: Mapping[str, tuple[int, int]], weights: Mapping[str, Tensor]) -> None:
    """RuntimeError that names the tensors which are missing or whose bits differ from what was
    sent.
    """
    found = fingerprints(weights)
    bad = [name for name in expected if found.get(name) != tuple(expected[name])]
    if bad or len(found) != len(expected):
        raise RuntimeError(
            f"reshard: {len(bad)} of {len(expected)} tensors did not arrive as they were sent, "
            f"first {bad[:3]}; "
            "the version is not published, the old weights stay."
        )


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
def _weights(device: Any) -> Tensor:
    return torch.arange(1, _WORDS + 1, device=device, dtype=torch.int64) * _ODD | 1


def _signed(value: int) -> int:
    """As an int64 holds it."""
    return (value + (1 << 63) & _MASK) - (1 << 63)
