"""The user's loss on what a backend computed: called, checked, and its errors told to all ranks."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.backends.packing import Packed
from rlkit.backends.ranks import any_rank
from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.checks import PeerError
from rlkit.types import LossFn


class Guarded:
    """A loss of micro-batches whose first error waits until all ranks have done their part."""

    def __init__(self, loss_fn: LossFn) -> None:
        self.loss_fn = loss_fn
        self.error: Exception | None = None

    def __call__(
        self, batch: Batch | None, packed: Packed, found: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``evaluate``; of a filler (no batch), or after an error, a loss that teaches nothing."""
        if batch is not None and self.error is None:
            try:
                return evaluate(self.loss_fn, batch, packed, found, entropies)
            except Exception as error:  # the user's code: peers wait for this rank's part
                self.error = error
        return 0 * found.sum(), {}

    def raise_on_all(self, backend: Any) -> None:
        """Raise the error here and a PeerError on the other ranks, gradients forgotten."""
        if any_rank(self.error is not None, backend.device):
            backend.zero_grad()
            error = self.error or PeerError("loss_fn: it raised an error on another rank.")
            error.__rlkit_told__ = True  # type: ignore[attr-defined]
            raise error


def wants_entropy(loss_fn: LossFn) -> bool:
    """Whether a loss has a parameter for the entropies."""
    return "entropy" in inspect.signature(loss_fn).parameters


def evaluate(
    loss_fn: LossFn, batch: Batch, packed: Packed, found: Tensor, entropies: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one micro-batch and its metrics, with ``loss``, of packed values [M].

    Entropies are [M], too, for a loss that asks for them.
    """
    lengths = packed.targets.lengths
    batch.device = found.device
    more = {"entropy": Rows(entropies, lengths).padded()} if wants_entropy(loss_fn) else {}
    loss, metrics = check_loss(loss_fn(Rows(found, lengths).padded(), batch, **more))  # [B, T]
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: got a loss without a gradient, need one made from the logprobs (of a "
            "critic the values) that it is given. Look for detach(), item() and no_grad(); a "
            "loss that may be constant adds 0 * batch.token_mean(logprobs)."
        )
    return loss, metrics | {"loss": loss.detach()}


def check_loss(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The (scalar, metrics) that a loss returned; errors say what it returned in place of it."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        got = type(result).__name__
        if isinstance(result, tuple):
            got = f"({', '.join(type(each).__name__ for each in result)})"
        raise TypeError(f"loss_fn: got {got} back, need (scalar loss, dict of 0-d tensors).")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"loss_fn: got a loss of shape {shape}, need a 0-d tensor. Average with "
            "batch.token_mean(...)."
        )
    out = {}
    for name, value in metrics.items():
        try:
            value = torch.as_tensor(value, device=loss.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"loss_fn: metric {name!r}: got {type(value).__name__}, need a 0-d tensor."
            ) from error
        if value.ndim != 0:
            raise TypeError(
                f"loss_fn: metric {name!r} has shape {tuple(value.shape)}, need a 0-d tensor: "
                "reduce it with "
                "batch.token_mean(...)."
            )
        out[name] = value.detach().to(torch.float64)
    return loss, out
