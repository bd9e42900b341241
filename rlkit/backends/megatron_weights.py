"""Weights by Hugging Face name on one side, a rank's tensors of megatron-core on the other.

Which rows lie where is what resharding plans know, too: tables, forms and sides of
``rlkit.reshard``. Nothing is converted: pieces are copied from one to the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.config import Layout, ModelSpec
from rlkit.reshard.plan_cells import holds, make_grid
from rlkit.reshard.plan_forms import megatron, separate
from rlkit.reshard.plan_ranks import Place, Side
from rlkit.reshard.plan_tables import Parameter, parameters


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one parameter, and the ranks that hold it, each in a tensor of its own."""

    whole: Place
    """In the tensor of the checkpoint."""
    ranks: dict[int, Place]
    """In the tensors of the ranks; of data-parallel copies and tied embeddings several."""


class Weights:
    """Moves weights between a checkpoint's tensors and those of one rank."""

    def __init__(self, model: ModelSpec, layout: Layout, rank: int) -> None:
        self.rank = rank
        self.table = parameters(model, dtype="float32")
        self.side = Side(model, self.table, layout, megatron(model, layout))
        self._one = Side(model, self.table, Layout(dp=1), separate(model, Layout()))
        self.pieces = [piece for p in self.table for piece in self._pieces(p)]
        self.shapes = {name: shape for name, shape, _ in self._one.tensors(0)}

    def _pieces(self, p: Parameter) -> Iterator[Piece]:
        grid = make_grid(p, (self.side, self._one), None)
        held = holds(self.side, p, grid)  # [ranks, cells]
        for layer in p.instances:
            on_stage = np.isin(self.side.stage, self.side.stages(p, layer))
            for cell in range(len(grid.rows)):
                ranks = np.flatnonzero(held[:, cell] & on_stage).tolist()
                for expert in range(*grid.experts[cell].tolist()):
                    where = p, layer, (expert, expert + 1), tuple(grid.rows[cell].tolist())
                    whole = self._one.place(0, *where)[0]
                    yield Piece(whole, {r: self.side.place(r, *where)[0] for r in ranks})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """RuntimeError unless a rank's tensors are those that its form says."""
        need = {name: shape for name, shape, _ in self.side.tensors(self.rank)}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        wrong = sorted(n for n in need.keys() | got.keys() if need.get(n) != got.get(n))
        if wrong:
            name = wrong[0]
            raise RuntimeError(
                f"MegatronBackend: rank {self.rank} has {name} {got.get(name)}, the form says "
                f"{need.get(name)} ({len(wrong)} differ). This is a fault of rlkit or another "
                "release of megatron-core than 0.16."
            )

    def spread(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's pieces of whole weights into its tensors; padding becomes 0.

        ValueError, before anything is changed, if weights are missing, left over or of other shape.
        """
        self._check_whole(weights)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.zero_()
            for piece in self.pieces:
                here = piece.ranks.get(self.rank)
                if here is not None:
                    view = tensors[here.name][here.index]
                    view.copy_(weights[piece.whole.name][piece.whole.index])

    def gather(self, tensors: Mapping[str, Tensor], broadcast: Any) -> dict[str, Tensor]:
        """Whole tensors by Hugging Face name, in host memory, on every rank; bit by bit.

        Each piece comes from the first rank that holds it: ``broadcast(tensor, rank)``.
        """
        some = next(iter(tensors.values()))
        found: dict[str, Tensor] = {}
        for piece in self.pieces:
            name, index = piece.whole.name, piece.whole.index
            if name not in found:
                found[name] = torch.empty(self.shapes[name], dtype=some.dtype)
            view = found[name][index]
            root, place = next(iter(piece.ranks.items()))
            mine = root == self.rank
            flat = tensors[place.name].detach()[place.index] if mine else view
            flat = flat.to(some.device).contiguous()
            broadcast(flat, root)
            view.copy_(flat)
        return found

    def _check_whole(self, weights: Mapping[str, Tensor]) -> None:
        tied = {"lm_head.weight"} - self.shapes.keys()
        got = {name: tuple(w.shape) for name, w in weights.items() if name not in tied}
        wrong = sorted(
            n for n in self.shapes.keys() | got.keys() if self.shapes.get(n) != got.get(n)
        )
        if wrong:
            name = wrong[0]
            raise ValueError(
                f"weights: got {name} {got.get(name, 'absent')}, need "
                f"{self.shapes.get(name, 'none of that name')} ({len(wrong)} differ). Was the "
                "checkpoint made for another shape?"
            )
