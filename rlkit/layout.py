"""How a model is cut over devices, and which part of it a rank has."""

import math
from dataclasses import dataclass, replace

import numpy as np

from rlkit.checks import whole
from rlkit.html import table

ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default order of ranks: tensor-parallel neighbours next to each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one model is cut over devices.

    Experts have cuts of their own, as in Megatron: a pipeline stage has tp x cp x dp devices, which
    are also expert_tp x ep x (copies of the experts).
    """

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int | None = None
    """Data parallel size; None takes what the plan's devices leave."""
    ep: int = 1
    """Expert parallel size: each has 1/ep of a layer's experts."""
    cp: int = 1
    """Context parallel size; its ranks hold the same weights."""
    expert_tp: int | None = None
    """Tensor parallel size inside an expert; None: tp. With 1, tp's ranks serve ep."""
    stages: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: as even as can be, the first stages one more."""
    rank_order: str = ORDER
    """Which of a rank's coordinates runs fastest, first."""

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "cp": self.cp}
        optional = {"dp": self.dp, "expert_tp": self.expert_tp}
        for name, value in (sizes | {k: v for k, v in optional.items() if v is not None}).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"Layout.{name}: got {value!r}, need an integer of at least 1."
                    + (" Leave it out to have it follow." if name in optional else "")
                )
        if sorted(str(self.rank_order).split("-")) != sorted(ORDER.split("-")):
            raise ValueError(
                f"Layout.rank_order: got {self.rank_order!r}, need tp, cp, ep, dp and pp once "
                f"each, joined by '-', fastest first, such as {ORDER!r}."
            )
        if not self._stages_fit():
            raise ValueError(
                f"Layout.stages: got {self.stages!r}, need pp={self.pp} counts of layers, "
                "each at least 1, in a tuple. Leave it out for an even split. Virtual stages, "
                "several runs of layers on one rank, are not offered: Megatron 0.16 computes wrong "
                "gradients there unless its messages overlap."
            )
        if self.dp is not None and self.num_devices % self.unit:
            raise ValueError(
                f"Layout: got tp={self.tp} x cp={self.cp} x dp={self.dp} = "
                f"{self.num_devices // self.pp} devices a stage, need a multiple of expert_tp="
                f"{self.tp_of_experts} x ep={self.ep}. Raise dp, or set expert_tp=1 so that the "
                "tensor-parallel ranks serve as expert-parallel ones."
            )

    def _stages_fit(self) -> bool:
        """None, or a tuple of pp counts."""
        return self.stages is None or (
            isinstance(self.stages, tuple)
            and len(self.stages) == self.pp
            and all(type(num) is int and num > 0 for num in self.stages)
        )

    @property
    def tp_of_experts(self) -> int:
        """Tensor parallel size inside an expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def unit(self) -> int:
        """Fewest devices the layout fits on, and whose multiples it fits on."""
        return self.pp * math.lcm(self.tp * self.cp, self.tp_of_experts * self.ep)

    @property
    def num_devices(self) -> int:
        """Devices the layout takes; the fewest if dp is left out."""
        return self.unit if self.dp is None else self.tp * self.pp * self.cp * self.dp

    def whole(self, what: str) -> "Layout":
        """This layout; ValueError if it cuts the model, which ``what`` does not do."""
        if self.tp * self.pp * self.cp * self.ep > 1:
            raise ValueError(
                f"{what}: got layout {self.short()}, need one that leaves the model whole on each "
                "device: spawn(..., n=). Only actors, critics and references are cut."
            )
        return self

    def on(self, num_devices: int) -> "Layout":
        """This layout with the dp that so many devices give it."""
        whole("devices", num_devices)
        if self.dp is not None and self.num_devices != num_devices:
            raise ValueError(
                f"Layout: got dp={self.dp}, which takes {self.num_devices} devices, on "
                f"{num_devices} devices; need equal numbers. Leave dp out to have it follow."
            )
        if num_devices % self.unit:
            raise ValueError(
                f"Layout: got {num_devices} devices, need a multiple of {self.unit} = pp x "
                f"lcm(tp x cp, expert_tp x ep) for {self.short()}. Change devices or the layout."
            )
        return replace(self, dp=num_devices // (self.tp * self.cp * self.pp))

    def layers_of_stages(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each stage of a model of ``num_layers``."""
        if self.stages is None:
            if num_layers < self.pp:
                raise ValueError(
                    f"Layout.pp: got {self.pp} stages for {num_layers} layers, need at most one "
                    "stage a layer. Lower pp."
                )
            each, more = divmod(num_layers, self.pp)
            return tuple(each + (stage < more) for stage in range(self.pp))
        if sum(self.stages) != num_layers:
            raise ValueError(
                f"Layout.stages: got {self.stages}, {sum(self.stages)} layers in all, need "
                f"{num_layers}, as many as the model has."
            )
        return self.stages

    def coordinates(self) -> dict[str, np.ndarray]:
        """Place of each rank [num_devices]: tp, cp, dp, pp, and of experts expert_tp, ep."""
        sizes = {"tp": self.tp, "cp": self.cp, "dp": self.num_devices, "pp": self.pp}
        sizes["dp"] //= self.tp * self.cp * self.pp
        experts = {"tp": self.tp_of_experts, "ep": self.ep, "dp": self.num_devices, "pp": self.pp}
        experts["dp"] //= self.tp_of_experts * self.ep * self.pp
        place, expert = (self._unravel(each) for each in (sizes, experts))
        if (place["pp"] != expert["pp"]).any():
            raise ValueError(
                f"Layout.rank_order: got {self.rank_order!r}, under which experts lie on other "
                f"pipeline stages than the rest of their layer; need pp last, as in {ORDER!r}."
            )
        return place | {"expert_tp": expert["tp"], "ep": expert["ep"]}

    def _unravel(self, sizes: dict[str, int]) -> dict[str, np.ndarray]:
        left, found = np.arange(self.num_devices), {}
        for name in self.rank_order.split("-"):
            left, found[name] = np.divmod(left, sizes.get(name, 1))
        return found

    def short(self) -> str:
        """Sizes above 1, as people write them: ``TP4 PP8 EP32``."""
        sizes = {"TP": self.tp, "PP": self.pp, "DP": self.dp or 1, "EP": self.ep, "CP": self.cp}
        parts = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        if self.ep > 1 and self.tp_of_experts != self.tp:
            parts.append(f"expert-TP{self.tp_of_experts}")
        return " ".join(parts) or "TP1"

    def _repr_html_(self) -> str:
        place = self.coordinates()
        columns = [name for name in place if int(place[name].max()) > 0]
        rows = [
            {"rank": rank} | {name: int(place[name][rank]) for name in columns}
            for rank in range(self.num_devices)
        ]
        return table(f"Layout {self.short()}, {self.num_devices} devices", rows)
