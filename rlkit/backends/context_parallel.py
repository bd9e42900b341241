"""Context parallelism: cp ranks share the tokens of every packed sequence.

Of a sequence's 2 x cp chunks of equal length rank r reads chunks r and 2 x cp - 1 - r, so that all
ranks have equal work under a causal mask. Before attention a rank gathers the keys and values of
all others, of its own heads: the way of Llama 3 (2407.21783, section 3.3.2).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from rlkit.backends.packing import Packed, filled, padded
from rlkit.models.attention import PackedAttention, positions


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank reads of a packed micro-batch: n of its N tokens, all of them with cp=1."""

    packed: Packed
    """The micro-batch, with what fills it up."""
    ids: Tensor
    """[n] int64."""
    predict: Tensor
    """[m] int64: place in ``ids`` whose logits predict a response token."""
    mine: Tensor
    """[m] int64: which of the M response tokens those are."""
    attend: Any
    """Attention of this rank's queries, as ``PackedAttention`` is called."""
    group: Any
    """Process group of the cp ranks."""

    def of_all(self, values: Tensor) -> Tensor:
        """[m] values of this rank's response tokens -> [M] of all ranks', on each.

        What is made of them must be the same on all: a rank's gradient is that of its own values.
        """
        from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region

        found = values.new_zeros(len(self.packed.temperature)).index_copy(0, self.mine, values)
        return reduce_from_tensor_model_parallel_region(found, group=self.group)


def part_of(packed: Packed | None, *, tp: int, group: Any, device: torch.device) -> Part:
    """This rank's part of a micro-batch (None: a filler), of a multiple of tp tokens.

    ``group`` is the process group of the cp ranks.
    """
    cp, rank = group.size(), group.rank()
    if cp == 1:
        packed = filled(packed, multiple=tp, device=device)
        mine = torch.arange(len(packed.temperature), device=device)
        attend = PackedAttention(packed.lengths)
        return Part(packed, packed.ids, packed.predict, mine, attend, group)
    packed = packed and padded(packed, multiple=2 * cp)
    packed = filled(packed, multiple=math.lcm(2, tp) * cp, device=device)
    places = [places_of(packed.lengths, each, cp).to(device) for each in range(cp)]
    own = packed.ids.new_full(packed.ids.shape, -1)  # place in this rank's tokens; -1: another's
    own[places[rank]] = torch.arange(len(packed.ids) // cp, device=device)
    predict = own[packed.predict]  # [M]
    mine = (predict >= 0).nonzero()[:, 0]
    order = torch.cat(places).argsort()  # from one rank after another to sequence after sequence

    def whole(tensor: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        return gather_from_sequence_parallel_region(tensor, group=group)[order]

    attend = SharedAttention(packed.lengths, rank, cp, whole)
    return Part(packed, packed.ids[places[rank]], predict[mine], mine, attend, group)


def places_of(lengths: Tensor, rank: int, cp: int) -> Tensor:
    """[n] place of a rank's tokens among all of sequences of lengths [S], multiples of 2 x cp."""
    chunk = positions(lengths) * 2 * cp // lengths.repeat_interleave(lengths)
    return ((chunk == rank) | (chunk == 2 * cp - 1 - rank)).nonzero()[:, 0]


class SharedAttention:
    """Causal attention inside each of S sequences, of one rank's queries to the keys of all.

    Sequence by sequence: where ranks share sequences, these are long and few. lengths [S] are
    multiples of 2 x cp; ``whole`` makes the [N, K, D] of all ranks of a rank's [n, K, D].
    """

    def __init__(
        self, lengths: Tensor, rank: int, cp: int, whole: Callable[[Tensor], Tensor]
    ) -> None:
        self.chunks, self.whole = (rank, 2 * cp - 1 - rank), whole
        self.starts = (lengths.cumsum(0) - lengths).tolist()
        self.sizes = (lengths // (2 * cp)).tolist()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [n, H, D], k and v [n, K, D] -> [n, H, D]; the layer's number is not used here."""
        k, v = self.whole(k), self.whole(v)
        queries = iter(q.split([size for size in self.sizes for _ in self.chunks]))
        found = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            for chunk in self.chunks:
                seen = slice(start, start + (chunk + 1) * size)
                found.append(_last_rows(next(queries), k[seen], v[seen]))
        return torch.cat(found)


def _last_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a sequence's last L tokens: q [L, H, D], k and v [T, K, D]."""
    num, seen = len(q), len(k)
    flipped = q.is_cpu and num < seen  # there torch would keep a mask [L, T] for the backward
    mask: Any = _mask_from_last(q, seen) if flipped else causal_lower_right(num, seen)
    q, k, v = (x.transpose(0, 1)[None] for x in (q.flip(0) if flipped else q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    out = out[0].transpose(0, 1)
    return out.flip(0) if flipped else out


def _mask_from_last(q: Tensor, seen: int) -> Tensor:
    """[L, T] for the last L of T tokens, the last of all first: row i may see keys below T - i.

    It depends on i + j alone, so it is L + T - 1 numbers, read from one further on in each row.
    """
    edge = q.new_zeros(len(q) + seen - 1)
    edge[seen:] = -torch.inf
    return edge.as_strided((len(q), seen), (1, 1))
