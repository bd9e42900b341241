"""One side of a plan: which rows of which parameter each rank holds, and where they lie."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from rlkit.config import Layout, ModelSpec
from rlkit.reshard.plan_forms import Form, Stored
from rlkit.reshard.plan_tables import Parameter


@dataclass(frozen=True, slots=True)
class Run:
    """Rows (or columns) ``start`` to ``stop`` of a parameter that lie together in a tensor."""

    start: int
    stop: int
    at: int
    """Where they begin in the rank's tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a rank's tensor: its name, and a slice of each dimension."""

    name: str
    index: tuple[slice, ...]
    in_one_run: bool
    """Its bytes lie together, if the tensor's do."""


class Side:
    """A model's parameters in one layout and form, on devices from ``first_rank`` on."""

    def __init__(
        self,
        model: ModelSpec,
        table: Sequence[Parameter],
        layout: Layout,
        form: Form,
        *,
        first_rank: int = 0,
    ) -> None:
        self.layout, self.form, self.first_rank = layout, form, first_rank
        self.num_ranks = layout.num_devices
        sizes = layout.layers_of_stages(model.num_layers)
        self.stage_of_layer = np.repeat(np.arange(layout.pp), sizes)  # [layers]
        self._first_layer = np.cumsum([0, *sizes[:-1]])
        place = layout.coordinates()
        self.stage, self.ep = place["pp"], place["ep"]  # [ranks]
        self._tp = {False: place["tp"], True: place["expert_tp"]}
        self._stored = {part: each for each in form.stored for part in each.parts}
        self._table = {p.name: p for p in table}
        _check_experts(layout, table)
        self.lengths = {p.name: self._length(p) for p in table}
        self.runs = {p.name: self._runs(p) for p in table}

    # ---- cuts ----

    def slots(self, p: Parameter) -> np.ndarray:
        """Tensor-parallel place of each rank [ranks] for a parameter."""
        return self._tp[p.experts]

    def _size(self, p: Parameter) -> int:
        return self.layout.tp_of_experts if p.experts else self.layout.tp

    def _length(self, p: Parameter) -> int:
        """Rows (columns) of a rank's part, padding of the vocabulary included."""
        extent, size = p.shape[p.axis], self._size(p)
        if p.cut is None:
            return extent
        if p.vocab:
            return self.form.rows_of_vocab(extent, size) // size
        blocks = extent // p.width
        if blocks % size == 0:
            return extent // size
        if p.copies and size % blocks == 0:
            return p.width
        name = "expert_tp" if p.experts else "tp"
        raise ValueError(
            f"Layout.{name}: got {size} for {p.named('*')} of {blocks} "  # type: ignore[arg-type]
            f"{'heads' if p.width > 1 else 'rows'}, need a divisor of {blocks}"
            f"{' or a multiple of it' if p.copies else ''}. Choose another {name}."
        )

    def _start(self, p: Parameter, slot: int) -> int:
        if p.cut is None:
            return 0
        shared = max(1, self._size(p) * p.width // p.shape[p.axis]) if p.copies else 1
        return slot // shared * self.lengths[p.name]

    def _runs(self, p: Parameter) -> list[list[Run]]:
        """Runs of each tensor-parallel slot."""
        stored, length = self._stored[p.name], self.lengths[p.name]
        lengths = [self.lengths[part] for part in stored.parts]
        before = sum(lengths[: stored.parts.index(p.name)])
        if not stored.by_group:
            groups, stride = 1, 0
        else:  # as many groups as the rank has keys, the second part
            groups = lengths[1] // self._table[stored.parts[1]].width
            stride, before = sum(lengths) // groups, before // groups
        each, extent = length // groups, p.shape[p.axis]
        found = []
        for slot in range(self._size(p)):
            starts = [self._start(p, slot) + group * each for group in range(groups)]
            runs = [
                Run(start, min(start + each, extent), before + group * stride)
                for group, start in enumerate(starts)
                if start < extent
            ]
            found.append(runs)
        return found

    def experts(self, p: Parameter) -> list[tuple[int, int]]:
        """First and last + 1 expert of each expert-parallel place; one (0, 1) of other tensors."""
        if not p.experts:
            return [(0, 1)]
        each = p.shape[0] // self.layout.ep
        return [(i * each, (i + 1) * each) for i in range(self.layout.ep)]

    def expert_slots(self, p: Parameter) -> np.ndarray:
        """Index into ``experts`` of each rank [ranks]."""
        return self.ep if p.experts else np.zeros_like(self.ep)

    # ---- stages ----

    def stages(self, p: Parameter, layer: int) -> tuple[int, ...]:
        """Pipeline stages that hold an instance."""
        if layer >= 0:
            return (int(self.stage_of_layer[layer]),)
        found = ({0} if p.first else set()) | ({self.layout.pp - 1} if p.last else set())
        return tuple(sorted(found))

    def nbytes(self, table: Sequence[Parameter]) -> np.ndarray:
        """Bytes that each rank holds [ranks], padding included."""
        by_stage = np.zeros(self.layout.pp, dtype=np.int64)
        for p in table:
            stages = [stage for layer in p.instances for stage in self.stages(p, layer)]
            np.add.at(by_stage, stages, self.nbytes_of(p))
        return by_stage[self.stage]

    def nbytes_of(self, p: Parameter) -> int:
        """Bytes of one instance on a rank that holds it."""
        return prod(self._local_shape(p)) * itemsize(p.dtype)

    def _local_shape(self, p: Parameter) -> list[int]:
        shape = list(p.shape)
        shape[p.axis] = self.lengths[p.name]
        if p.experts:
            shape[0] //= self.layout.ep
        return shape

    # ---- tensors ----

    def place(
        self, rank: int, p: Parameter, layer: int, experts: tuple[int, int], rows: tuple[int, int]
    ) -> list[Place]:
        """Where a piece lies on a rank, expert by expert if experts are not stacked."""
        stored = self._stored[p.name]
        run = next(r for r in self.runs[p.name][self.slots(p)[rank]] if r.start <= rows[0] < r.stop)
        axis = p.axis - int(p.experts)
        index = [slice(None)] * (len(p.shape) - int(p.experts))
        index[axis] = slice(rows[0] - run.start + run.at, rows[1] - run.start + run.at)
        full = rows[1] - rows[0] == sum(self.lengths[part] for part in stored.parts)
        if not p.experts:
            return [Place(self._name(stored, rank, p, layer), tuple(index), full or not axis)]
        first = self.experts(p)[self.ep[rank]][0]
        local = (experts[0] - first, experts[1] - first)
        if stored.stacked:
            name = self._name(stored, rank, p, layer)
            one_run = full or (not axis and local[1] - local[0] == 1)
            return [Place(name, (slice(*local), *index), one_run)]
        return [
            Place(self._name(stored, rank, p, layer, first, i), tuple(index), full or not axis)
            for i in range(*local)
        ]

    def _name(
        self, stored: Stored, rank: int, p: Parameter, layer: int, first: int = 0, local: int = 0
    ) -> str:
        stage = int(self.stage[rank])
        if layer < 0 and p.first and p.last and stage > 0:
            return self.form.tied_name
        number = int(layer - self._first_layer[stage])
        return stored.name.format(
            layer=layer, local=number, expert=first + local, local_expert=local
        )

    def tensors(self, rank: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(name, shape, dtype) of each tensor of a rank."""
        stage = int(self.stage[rank])
        for stored in self.form.stored:
            parts = [self._table[name] for name in stored.parts]
            p, shape = parts[0], self._local_shape(parts[0])
            shape[p.axis] = sum(self.lengths[name] for name in stored.parts)
            for layer in p.instances:
                if stage not in self.stages(p, layer):
                    continue
                if not p.experts or stored.stacked:
                    yield self._name(stored, rank, p, layer), tuple(shape), p.dtype
                    continue
                first = self.experts(p)[self.ep[rank]][0]
                for local in range(shape[0]):
                    name = self._name(stored, rank, p, layer, first, local)
                    yield name, tuple(shape[1:]), p.dtype


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype: got {dtype!r}, need torch's name of one, such as 'bfloat16'.")
    return int(found.itemsize)


def _check_experts(layout: Layout, table: Sequence[Parameter]) -> None:
    num = next((p.shape[0] for p in table if p.experts), 1)
    if num % layout.ep:
        what = (
            f"a divisor of the model's {num} experts" if num > 1 else "1: the model has no experts"
        )
        raise ValueError(f"Layout.ep: got {layout.ep}, need {what}. Choose another ep.")
