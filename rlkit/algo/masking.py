"""Masks over response tokens: which ones belong to a response, and sums over them."""

from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def masked_sum(x: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Sum of each row of x over the tokens of a mask.

    x [B, T], mask [B, T] -> [B]. What lies under a zero mask is not read: it may be NaN, and gets
    no gradient.
    """
    return torch.where(mask.bool(), x, 0.0).sum(1)


def response_mask(
    response_ids: Int[Tensor, "B T"],
    *,
    stop_token_ids: Collection[int],
    lengths: Int[Tensor, " B"] | None = None,
) -> tuple[Bool[Tensor, "B T"], Bool[Tensor, " B"]]:
    """Mask up to and including the first stop token of each response, and which responses have
    none.

    response_ids [B, T], padded on the right; lengths [B]: tokens of each response, where they are
    known. Returns mask [B, T], 1 on the response's tokens, and truncated [B]. It goes by position,
    never by the padding's id: a pad token that is also the stop token neither loses the true end
    nor keeps padding.
    """
    stops = torch.isin(response_ids, response_ids.new_tensor(list(stop_token_ids)))  # [B, T]
    inside = torch.ones_like(stops)
    if lengths is not None:
        inside = torch.arange(stops.shape[1], device=stops.device) < lengths[:, None]
    stops = stops & inside
    before = stops.cumsum(1) - stops.long()  # stop tokens before this one
    return (before == 0) & inside, ~stops.any(1)
