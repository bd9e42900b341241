"""A rank's share of a plan as views of its tensors: what it sends, receives and checks.

A message is all that one rank sends another in one bucket: its small pieces packed together, each
large one by itself, then a fingerprint a piece. Large pieces travel from where they lie to where
they belong; only those that do not lie in one run are copied.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlkit.reshard.fingerprints import as_bytes, fingerprint_rows, words_of
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_ranks import Place, itemsize

LARGE = 256 << 10  # bytes: from here on a copy costs more than a message
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one parameter, and where a rank has it."""

    name: str
    """Hugging Face name."""
    corner: tuple[int, ...]
    """Index of its first element in the whole tensor; of an expert, in the expert's."""
    dtype: str
    nbytes: int
    here: Place | None
    """In a tensor of this rank; None for what a target receives and does not keep."""

    @property
    def in_place(self) -> bool:
        """It travels by itself from or to where it lies."""
        return self.nbytes >= LARGE and self.here is not None and self.here.in_one_run

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The piece in a rank's tensors."""
        assert self.here is not None
        return tensors[self.here.name].detach()[self.here.index]

    def element(self, inside: Sequence[Any]) -> str:
        """``name[row, column]`` of an element of the view, as the whole tensor counts it."""
        num = len(self.corner)  # a stacked expert's view has one dimension more
        index = [a + int(b) for a, b in zip(self.corner, inside[-num:], strict=True)]
        return f"{self.name}[{', '.join(map(str, index))}]"


class Part(NamedTuple):
    """A piece during a reshard."""

    piece: Piece
    view: Tensor | None
    """The piece in the rank's tensors; None for what is not kept."""
    bytes: Tensor
    """What travels [nbytes]: the view itself, or its copy in a buffer."""
    copied: bool


@dataclass(frozen=True, slots=True)
class Message:
    """What travels between this rank and a peer in one bucket."""

    bucket: int
    peer: int
    pieces: tuple[Piece, ...]
    """From the smallest to the largest."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces."""
        return sum(piece.nbytes for piece in self.pieces)

    def room(self, *, in_place: bool = True) -> int:
        """Bytes of buffer that ``parts`` needs."""
        return sum(_aligned(p.nbytes) for p in self.pieces if not (in_place and p.in_place))

    def parts(
        self, tensors: Mapping[str, Tensor], flat: Tensor, *, in_place: bool = True
    ) -> list[Part]:
        """Where each piece is while it travels: in the rank's tensors, or in ``flat`` [room]."""
        found, start = [], 0
        for piece in self.pieces:
            view = None if piece.here is None else piece.view(tensors)
            if in_place and piece.in_place:
                assert view is not None
                found.append(Part(piece, view, as_bytes(view), copied=False))
                continue
            end, start = start + piece.nbytes, start + _aligned(piece.nbytes)
            found.append(Part(piece, view, flat[end - piece.nbytes : end], copied=True))
            if end < start:
                flat[end:start] = 0  # fingerprints are of whole words
        return found

    def frames(self, parts: Sequence[Part], flat: Tensor) -> list["Frame"]:
        """What travels at once: small parts together, in ``flat``; each large one by itself."""
        small = [part for part in parts if part.piece.nbytes < LARGE]
        size = sum(_aligned(part.piece.nbytes) for part in small)
        packed = [Frame(flat[:size], small)] if small else []
        return packed + [Frame(part.bytes, [part]) for part in parts[len(small) :]]


class Frame(NamedTuple):
    """Bytes that travel at once, and the parts in them."""

    bytes: Tensor
    inside: list[Part]

    def fingerprints(self, version: int) -> Tensor:
        """[parts]. The version is part of them, so that a message of an earlier reshard is no
        message.
        """
        words, start, found = words_of(self.bytes), 0, []
        for length, same in groupby(_aligned(part.piece.nbytes) // 8 for part in self.inside):
            end = start + len(list(same)) * length
            found.append(fingerprint_rows(words[start:end].view(-1, length)))
            start = end
        return torch.cat(found) ^ version


def pack(parts: Sequence[Part]) -> None:
    """Copy what does not travel from where it lies."""
    for part in parts:
        if part.copied and part.view is not None:
            part.bytes.view(part.view.dtype).view(part.view.shape).copy_(part.view)


def unpack(parts: Sequence[Part]) -> None:
    """Copy what did not arrive where it belongs."""
    for part in parts:
        if part.copied and part.view is not None:
            part.view.copy_(part.bytes.view(part.view.dtype).view(part.view.shape))


def damaged(parts: Sequence[Part], sums: Tensor, found: Tensor) -> list[str]:
    """Names of pieces that are kept and arrived with other bits than the source sent."""
    wrong = (sums != found).nonzero()[:, 0].tolist()
    return [parts[i].piece.name for i in wrong if parts[i].view is not None]


def differing(parts: Sequence[Part]) -> list[str]:
    """``name[index]`` of the first element of each piece that lies in a target's tensors with other
    bits than in the buffer: no fingerprints.
    """
    found = []
    for piece, view, sent, _ in parts:
        if view is not None and not same_bits(view, sent.view(view.dtype).view(view.shape)):
            wrong = as_bytes(view.contiguous()) != sent
            element = int(wrong.nonzero()[0]) // itemsize(piece.dtype)
            found.append(piece.element(np.unravel_index(element, tuple(view.shape))))
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal bits of two tensors of one shape and dtype, NaN and signs of zeros included."""
    bits = _BITS[one.itemsize]
    return torch.equal(one.view(bits), other.view(bits))


class Share:
    """Messages of one rank by bucket."""

    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        moves = plan.moves
        self.num_buckets = int(moves.bucket.max()) + 1
        self.outgoing: dict[int, list[Message]] = {}
        self.incoming: dict[int, list[Message]] = {}
        for ours, theirs, into in (
            (moves.source, moves.target, self.outgoing),
            (moves.target, moves.source, self.incoming),
        ):
            for row in _rows_by_message(moves.bucket, theirs, np.flatnonzero(ours == rank)):
                bucket, peer = int(moves.bucket[row[0]]), int(theirs[row[0]])
                pieces = self._pieces(row, outgoing=into is self.outgoing)
                into.setdefault(bucket, []).append(Message(bucket, peer, pieces))

    def far(self, messages: dict[int, list[Message]], bucket: int) -> list[Message]:
        """Those of a bucket that travel."""
        return [message for message in messages.get(bucket, []) if message.peer != self.rank]

    def rooms(self, *, in_place: bool = True) -> tuple[int, int]:
        """Bytes of buffer for all that arrives in one bucket, and for one message that is sent."""
        arriving, leaving = [0], [0]
        for bucket in range(self.num_buckets):
            incoming, outgoing = (self.far(m, bucket) for m in (self.incoming, self.outgoing))
            arriving.append(sum(message.room(in_place=in_place) for message in incoming))
            leaving += [message.room(in_place=in_place) for message in outgoing]
        return max(arriving), max(leaving)

    def kept(self) -> Counter[str]:
        """Bytes that arrive of each tensor: what is less than the tensor leaves padding."""
        found: Counter[str] = Counter()
        for message in (m for messages in self.incoming.values() for m in messages):
            for piece in message.pieces:
                if piece.here is not None:
                    found[piece.here.name] += piece.nbytes
        return found

    def _pieces(self, rows: np.ndarray, *, outgoing: bool) -> tuple[Piece, ...]:
        cut, moves, found = self.plan.cut, self.plan.moves, []
        side = cut.train if outgoing else cut.infer
        for row in rows.tolist():
            block, layer = self.plan.blocks[moves.block[row]], int(moves.layer[row])
            p, cell = block.parameter, moves.cell[row]
            experts, part = (tuple(x[cell].tolist()) for x in (block.grid.experts, block.grid.rows))
            nbytes = int(moves.nbytes[row]) // (experts[1] - experts[0])
            for expert in range(*experts):  # one by one: either side may keep them apart
                corner = [0] * len(p.shape)
                corner[p.axis] = part[0]
                corner = corner[int(p.experts) :]
                here = None
                if outgoing or moves.needed[row]:
                    rank = self.rank - side.first_rank
                    here = side.place(rank, p, layer, (expert, expert + 1), part)[0]
                name = p.named(layer, expert)
                found.append(Piece(name, tuple(corner), p.dtype, nbytes, here))
        return tuple(sorted(found, key=lambda piece: piece.nbytes))


def _rows_by_message(bucket: np.ndarray, peer: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Rows of moves, cut where bucket or peer changes; sorted by both."""
    order = rows[np.lexsort((rows, peer[rows], bucket[rows]))]
    if not len(order):
        return []
    new = (np.diff(bucket[order]) != 0) | (np.diff(peer[order]) != 0)
    return np.split(order, np.flatnonzero(new) + 1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
