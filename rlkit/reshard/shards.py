"""What one rank holds of a model in both layouts of a plan, and where it is."""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rlkit.config import Layout, ModelSpec
from rlkit.reshard.pieces import Share
from rlkit.reshard.plan_cells import holds, make_grid
from rlkit.reshard.plan_forms import Form, separate
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_ranks import Side
from rlkit.reshard.plan_tables import parameters
from rlkit.reshard.swap import HostSwap
from rlkit.trace import storage_bytes


class Shards:
    """A rank's training and generation tensors by name.

    ``reshard_in_process`` and ``reshard_over`` fill the generation tensors; ``to_training`` is the
    way back. A backend hands over ``training``, the tensors that its form and layout say; it keeps
    its own objects, which a swap leaves empty meanwhile.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        training: Mapping[str, Tensor],
        *,
        device: str = "cpu",
        version: int = 0,
    ) -> None:
        self.plan, self.rank, self.device, self.version = plan, rank, device, version
        self.training = dict(training)
        check_tensors(_facts(plan.cut.train, rank), self.training, rank)
        self._generation: dict[str, Tensor] | None = None
        self._whole = False
        self._swap = HostSwap(self.training if plan.swaps else {})

    @cached_property
    def share(self) -> Share:
        """What this rank sends and receives."""
        return Share(self.plan, self.rank)

    @property
    def generation(self) -> dict[str, Tensor]:
        """Generation tensors by name, of ``version``."""
        if self._generation is None or not self._whole:
            raise RuntimeError(
                f"rank {self.rank}: no whole generation weights, because "
                + ("a reshard failed in place" if self._generation else "they are not made yet")
                + "; need a reshard that succeeds. Call it again."
            )
        return self._generation

    def begin(self) -> dict[str, Tensor]:
        """Generation tensors to be filled: those there are, or new ones, padding 0."""
        self._whole = False
        if self._generation is None:
            kept = self.share.kept()
            self._generation = {
                name: torch.empty(shape, dtype=dtype, device=self.device)
                for name, (shape, dtype) in _facts(self.plan.cut.infer, self.rank).items()
            }
            for name, tensor in self._generation.items():
                if kept[name] < tensor.nbytes:
                    tensor.zero_()
        return self._generation

    def hand_over(self) -> dict[str, Tensor]:
        """Generation tensors, which are the caller's from now on; the next reshard makes others."""
        found, self._generation = self.generation, None
        return found

    def buffer(self, nbytes: int) -> Tensor:
        """Room on the rank's device [nbytes]."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def swap_out(self) -> None:
        """Move training shards to host memory, if the plan does."""
        if self.plan.swaps:
            self._swap.out()

    def publish(self, version: int) -> None:
        """Serve what arrived as ``version``."""
        self.version, self._whole = version, True

    def discard(self) -> None:
        """After an error: the version stays. What a plan fills in place is mixed then."""
        self.to_training()

    def to_training(self) -> None:
        """Free generation tensors and bring the training shards back, if the plan swaps."""
        if self.plan.swaps:
            self._generation = None
            self._swap.back()

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        held = [*self.training.values(), *(self._generation or {}).values()]
        return {"weights": storage_bytes(held), "host_swap": self._swap.host_bytes}


def shard(
    model: ModelSpec,
    layout: Layout,
    form: Callable[[ModelSpec, Layout], Form],
    whole: Mapping[str, Tensor],
) -> list[dict[str, Tensor]]:
    """Tensors of each rank, cut from a whole model's by Hugging Face name."""
    layout = layout.on(layout.num_devices)
    some = next(iter(whole.values()))
    table = parameters(model, dtype=str(some.dtype)[6:])
    side = Side(model, table, layout, form(model, layout))
    one = Side(model, table, Layout(dp=1), separate(model, Layout()))
    check_tensors(_facts(one, 0), whole, 0)
    ranks = []
    for rank in range(side.num_ranks):
        tensors = {
            name: torch.zeros(shape, dtype=dtype, device=some.device)
            for name, (shape, dtype) in _facts(side, rank).items()
        }
        for p in table:
            grid = make_grid(p, (side, one), None)
            cells = np.flatnonzero(holds(side, p, grid)[rank]).tolist()
            for layer in p.instances:
                if side.stage[rank] not in side.stages(p, layer):
                    continue
                for cell, expert in ((c, e) for c in cells for e in range(*grid.experts[c])):
                    where = p, layer, (expert, expert + 1), tuple(grid.rows[cell].tolist())
                    source, target = one.place(0, *where)[0], side.place(rank, *where)[0]
                    view = tensors[target.name][target.index]
                    view.copy_(whole[source.name][source.index].view(view.shape))
        ranks.append(tensors)
    return ranks


def check_tensors(
    need: Mapping[str, tuple[tuple[int, ...], torch.dtype]], got: Mapping[str, Tensor], rank: int
) -> None:
    """ValueError that names the first tensor which is not what the plan says a rank holds."""
    for name in sorted(need.keys() | got.keys()):
        mine = (tuple(got[name].shape), got[name].dtype) if name in got else None
        if mine != need.get(name):
            raise ValueError(
                f"rank {rank}: {name} is {_text(mine)}, the plan says {_text(need.get(name))}. "
                "Was the plan made for another model, layout or form? Call plan_reshard with what "
                "the workers have now."
            )


def _text(facts: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "absent" if facts is None else f"{facts[0]} of {facts[1]}"


def _facts(side: Side, rank: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a rank of the whole plan; none on the other side's."""
    rank -= side.first_rank
    if not 0 <= rank < side.num_ranks:
        return {}
    return {name: (shape, getattr(torch, dtype)) for name, shape, dtype in side.tensors(rank)}
