"""Keys and values of running rows.

Slots by row, the running rows always the first ones; as many and as long as was needed so far.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from rlkit.config import ModelSpec
from rlkit.models.attention import PackedAttention


class KVCache:
    """Cache [layers, 2, slots, K, max_len, D]; slot i holds ``lengths[i]`` tokens."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_slots: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (spec.num_layers, 2, num_slots, spec.num_kv_heads, max_len, spec.head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        """Rows the cache can hold."""
        return self.data.shape[2]

    @property
    def max_len(self) -> int:
        """Tokens a row can hold."""
        return self.data.shape[4]

    def reserve(self, *, num_slots: int, max_len: int, used: int, most: tuple[int, int]) -> None:
        """Make room for ``num_slots`` rows of ``max_len`` tokens, keeping the first ``used``; where
        that is too little, twice as many, up to ``most`` of both.
        """
        if num_slots <= self.num_slots and max_len <= self.max_len:
            return
        num_slots = _grown(self.num_slots, num_slots, most=most[0])
        max_len = _grown(self.max_len, max_len, most=most[1])
        layers, both, _, heads, _, width = self.data.shape
        kept, lengths = self.data[:, :, :used], self.lengths[:used]
        if not used:
            self.data = self.data.new_empty(0)  # frees the old one before there is a new one
        self.data = kept.new_zeros((layers, both, num_slots, heads, max_len, width))
        self.data[:, :, :used, :, : kept.shape[4]] = kept
        self.lengths = torch.zeros(num_slots, dtype=torch.int64)
        self.lengths[:used] = lengths

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` [N] onto slots ``target`` [N]."""
        if len(source):
            known = self.data[:, :, :, :, : int(self.lengths[source].max())]
            known[:, :, target.to(known.device)] = known[:, :, source.to(known.device)]
            self.lengths[target] = self.lengths[source]


def _grown(size: int, needed: int, *, most: int) -> int:
    """``size`` if it is enough, else at least twice it, so that growing costs little in all."""
    return size if needed <= size else min(most, max(needed, 2 * size))


class Prefill:
    """Attention of whole prompts that also fills the cache.

    Prompt j, computed once, goes to its first slot.
    """

    def __init__(self, cache: KVCache, lengths: Tensor, slots: Tensor) -> None:
        self.cache, self.packed = cache, PackedAttention(lengths)
        self.slots, self.longest = slots.to(cache.data.device), int(lengths.max())
        cache.lengths[slots] = lengths

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, K, D] of packed prompts -> [N, H, D]."""
        data = self.cache.data[layer]
        data[0, self.slots, :, : self.longest] = self.packed.pad(k)
        data[1, self.slots, :, : self.longest] = self.packed.pad(v)
        return self.packed(layer, q, k, v)


class Decode:
    """Attention of one new token for each of the first ``num`` slots, appended to the cache.

    The query heads that share a key head are the queries of one attention, so no key is copied.
    """

    def __init__(self, cache: KVCache, num: int) -> None:
        lengths = cache.lengths[:num]
        self.cache, self.num = cache, num
        self.last, longest = int(lengths.min()), int(lengths.max())
        self.width, self.mask = longest + 1, None
        if self.last < longest:
            data = cache.data
            at = lengths.to(data.device)
            heads = torch.arange(num * data.shape[3], device=data.device).view(num, -1)
            self.places = heads * cache.max_len + at[:, None]  # [B, K] of the cache's flat rows
            outside = torch.arange(self.width, device=data.device) > at[:, None]  # [B, L]
            mask = torch.zeros(outside.shape, device=data.device, dtype=data.dtype)
            self.mask = mask.masked_fill_(outside, float("-inf"))[:, None, None]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, D], k and v [B, K, D] of the new tokens -> [B, H, D]."""
        keys, values = self.cache.data[layer]
        if self.mask is None:
            keys[: self.num, :, self.last], values[: self.num, :, self.last] = k, v
        else:
            for flat, new in ((keys, k), (values, v)):
                flat.view(-1, flat.shape[-1])[self.places] = new
        out = F.scaled_dot_product_attention(
            q.unflatten(1, (k.shape[1], -1)),  # [B, K, H / K, D]
            keys[: self.num, :, : self.width],
            values[: self.num, :, : self.width],
            attn_mask=self.mask,
        )
        return out.flatten(1, 2)
