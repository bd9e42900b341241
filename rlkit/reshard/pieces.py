"""A rank's share of a plan as views of its tensors: what it packs, unpacks and checks.

A message is all that one rank sends another in one bucket: its pieces, each begun at a multiple of
8 bytes, then two 64-bit integers a piece, the piece's fingerprint.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.reshard.fingerprints import as_bytes, fingerprint
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_ranks import Place, itemsize

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one parameter, and where a rank has it."""

    name: str
    """Hugging Face name."""
    corner: tuple[int, ...]
    """Index of its first element in the whole tensor; of an expert, in the expert's."""
    dtype: str
    nbytes: int
    start: int
    """Its first byte in the message."""
    here: Place | None
    """In a tensor of this rank; None for what a target receives and does not keep."""

    def view(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The piece in a rank's tensors."""
        assert self.here is not None
        return tensors[self.here.name].detach()[self.here.index]

    def element(self, inside: Sequence[Any]) -> str:
        """``name[row, column]`` of an element of the view, as the whole tensor counts it."""
        num = len(self.corner)  # a stacked expert's view has one dimension more
        index = [a + int(b) for a, b in zip(self.corner, inside[-num:], strict=True)]
        return f"{self.name}[{', '.join(map(str, index))}]"


@dataclass(frozen=True, slots=True)
class Message:
    """What travels between this rank and a peer in one bucket."""

    bucket: int
    peer: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.body + FINGERPRINT_BYTES * len(self.pieces)

    @property
    def body(self) -> int:
        """Bytes of the pieces."""
        last = self.pieces[-1]
        return last.start + _aligned(last.nbytes)

    def pack(self, tensors: Mapping[str, Tensor], flat: Tensor, *, version: int | None) -> Tensor:
        """The message, from a source's tensors into flat [nbytes] uint8.

        The version is part of the fingerprints, so that a message of an earlier reshard is no
        message. Without one there are none.
        """
        sums = []
        for piece in self.pieces:
            view, part = piece.view(tensors), flat[piece.start : piece.start + piece.nbytes]
            part.view(view.dtype).view(view.shape).copy_(view)
            sums.append((0, 0) if version is None else _stamped(part, version))
        flat[self.body :].view(torch.int64).copy_(torch.tensor(sums).reshape(-1))
        return flat

    def unpack(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Put what a target keeps into its tensors."""
        for piece, part, _ in self._kept(flat):
            view = piece.view(tensors)
            view.copy_(part.view(view.dtype).view(view.shape))

    def damaged(self, flat: Tensor, tensors: Mapping[str, Tensor], *, version: int) -> list[str]:
        """Names of pieces that lie in a target's tensors with other bits than the source sent."""
        return [
            piece.name
            for piece, _, sums in self._kept(flat)
            if _stamped(piece.view(tensors), version) != sums
        ]

    def differing(self, flat: Tensor, tensors: Mapping[str, Tensor]) -> list[str]:
        """``name[index]`` of the first element of each such piece: bit by bit, no fingerprints."""
        found = []
        for piece, part, _ in self._kept(flat):
            view = piece.view(tensors)
            wrong = as_bytes(view.contiguous()) != part
            if bool(wrong.any()):
                element = int(wrong.nonzero()[0]) // itemsize(piece.dtype)
                found.append(piece.element(np.unravel_index(element, tuple(view.shape))))
        return found

    def _kept(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor, tuple[int, int]]]:
        """(piece, its bytes, its fingerprint) of what a target keeps."""
        sums = flat[self.body :].view(torch.int64).view(-1, 2).tolist()
        for piece, (plain, weighted) in zip(self.pieces, sums, strict=True):
            if piece.here is not None:
                yield piece, flat[piece.start : piece.start + piece.nbytes], (plain, weighted)


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

    @property
    def most_in(self) -> int:
        """Bytes that arrive in the largest bucket."""
        sizes = (self.far(self.incoming, bucket) for bucket in self.incoming)
        return max((sum(m.nbytes for m in each) for each in sizes), default=0)

    @property
    def most_out(self) -> int:
        """Bytes of the largest message that is sent."""
        sizes = (m.nbytes for bucket in self.outgoing for m in self.far(self.outgoing, bucket))
        return max(sizes, default=0)

    def _pieces(self, rows: np.ndarray, *, outgoing: bool) -> tuple[Piece, ...]:
        cut, moves, found, start = self.plan.cut, self.plan.moves, [], 0
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
                found.append(Piece(name, tuple(corner), p.dtype, nbytes, start, here))
                start += _aligned(nbytes)
        return tuple(found)


def _rows_by_message(bucket: np.ndarray, peer: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    """Rows of moves, cut where bucket or peer changes; sorted by both."""
    order = rows[np.lexsort((rows, peer[rows], bucket[rows]))]
    if not len(order):
        return []
    new = (np.diff(bucket[order]) != 0) | (np.diff(peer[order]) != 0)
    return np.split(order, np.flatnonzero(new) + 1)


def _stamped(tensor: Tensor, version: int) -> tuple[int, int]:
    plain, weighted = fingerprint(tensor)
    return plain ^ version, weighted


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
