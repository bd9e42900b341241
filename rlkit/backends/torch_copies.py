"""A whole decoder on each data-parallel rank, with the methods of ``torch_parallel.Parallel``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.backends.packing import Packed
from rlkit.models.decoder import Decoder


class Copies:
    """Data-parallel ranks that have a whole decoder each: only gradients meet."""

    def __init__(self, decoder: Decoder, peers: Any) -> None:
        self.decoder, self._peers = decoder, peers

    def together(self) -> AbstractContextManager[None]:
        """Ranks wait for each other only in ``add_up``."""
        return nullcontext()

    def num_in_step(self, num: int) -> int:
        """As many micro-batches as this rank has."""
        return num

    def per_token(self, hidden: Tensor, packed: Packed, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """``Decoder.per_token`` of hidden states [M, hidden]."""
        targets = packed.targets.tensor
        return self.decoder.per_token(hidden, targets, packed.temperature, entropy=entropy)

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the ranks."""
        if self._peers is None:
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        self._peers.sum_(flat)
        pieces = flat.split([p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces, strict=True):
            p.grad = piece.view_as(p)

    def forget_whole(self) -> None:
        """Nothing was gathered."""

    def close(self) -> None:
        """Nothing to forget."""

    def local(self, tensor: Tensor) -> Tensor:
        """All of it is here."""
        return tensor

    of_tp = local

    def whole(self, tensor: Tensor) -> Tensor:
        """All of it, without its gradient."""
        return tensor.detach()

    def cut_like(self, like: Tensor, tensor: Tensor) -> Tensor:
        """Nothing is cut."""
        return tensor
