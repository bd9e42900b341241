"""Attention over packed sequences.

No padding anywhere but inside the kernel, and none if lengths are equal.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


class PackedAttention:
    """Causal attention inside each of S sequences packed end to end; no token sees another
    sequence.

    lengths [S] int64: tokens of each sequence; they add up to N.
    """

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.num, self.longest = len(lengths), int(lengths.max()) if len(lengths) else 0
        self.even = self.num * self.longest == int(lengths.sum())
        if not self.even:
            inside = torch.arange(self.longest) < lengths[:, None]  # [S, L]
            self.slots = inside.reshape(-1).nonzero()[
                :, 0
            ]  # [N] place of each token in the padded form

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] -> [N, H, D]; the layer's number is not used here."""
        q, k, v = self.pad(q), self.pad(k), self.pad(v)  # [S, H or K, L, D]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.unpad(out)

    def pad(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [S, H, L, D], zeros after the end of short sequences."""
        if not self.even:
            wide = x.new_zeros((self.num * self.longest, *x.shape[1:]))
            x = wide.index_copy(0, self.slots.to(x.device), x)
        return x.view(self.num, self.longest, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[S, H, L, D] -> [N, H, D]."""
        flat = x.transpose(1, 2).reshape(self.num * self.longest, x.shape[1], x.shape[3])
        return flat if self.even else flat.index_select(0, self.slots.to(x.device))


def positions(lengths: Tensor) -> Tensor:
    """[S] lengths -> [N] position of each packed token in its own sequence.

    0, 1, ..., again from 0.
    """
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - starts
