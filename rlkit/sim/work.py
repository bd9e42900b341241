"""What is simulated: the workload, the software's rates, and a run on some devices."""

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

from rlkit.checks import finite, fits, instance, whole
from rlkit.config import Layout, ModelSpec
from rlkit.sim.lengths import Lengths
from rlkit.sim.specs import Counts, Node, counts

if TYPE_CHECKING:
    from rlkit.sim.moves import Move

FROM_0 = ("rollout_devices", "forwards")  # counts of a run that may be 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What one train step consumes."""

    prompts: int
    """Groups a step."""
    samples: int
    """Responses a prompt."""
    prompt_tokens: int
    """Mean length of a prompt."""
    lengths: Lengths
    """Of responses."""

    def __post_init__(self) -> None:
        whole("Workload.prompts", self.prompts)
        whole("Workload.samples", self.samples)
        finite("Workload.prompt_tokens", self.prompt_tokens)
        instance("Workload.lengths", self.lengths, Lengths)

    @property
    def sequences(self) -> int:
        """Responses a step."""
        return self.prompts * self.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The software's rates, the same for every run of a fit.

    ``FITTED`` names those that a study's fit changes, ``CALIBRATED`` those that only a trace tells
    of, ``SOURCED`` those with a source; all others are assumed: ``rk.sim.constants(run)``. Defaults
    are round numbers; what fits published runs is in ``experiments/fit.toml``.
    """

    train_bytes_per_flop: float = 5.0e-3
    """Fitted. Memory traffic of training beside its matrix products, which it does not overlap."""
    decode_overhead_s: float = 6.0e-3
    """Fitted. Scheduler, sampler and launches of one decode step."""
    trainer_s_per_sequence: float = 5.0e-3
    """Fitted. A trainer's call's cost of a sequence, which more devices do not lower."""
    slow_software: float = 1.0
    """Fitted. Factor on seconds of compute and overhead on devices of the 910 family."""
    decode_s_per_row: float = 0.0
    """Calibrated. A decode step's cost of a row outside of the model: sampling, bookkeeping."""
    contention: float = 0.0
    """Calibrated. What each other busy worker adds to a worker's seconds, as a share of them: 0
    where each has devices of its own, about 1 where they share one core."""
    slice_s: float = 0.0
    """Calibrated. How long engines generate before groups, prompts and weights move, as those of a
    ``RolloutFeed`` do; 0: these move at once."""
    turn_s: float = 0.0
    """Calibrated. What an engine waits for the driver between two slices."""
    matmul_efficiency: float = 0.7
    """Assumed. Share of the peak that large matrix products reach."""
    memory_efficiency: float = 0.7
    """Assumed. Share of the memory bandwidth that reads reach."""
    link_efficiency: float = 0.7
    """Assumed. Share of a link's bandwidth that collectives reach."""
    trainer_s: float = 5.0
    """Assumed. Trainer's cost of a step, whatever its size."""
    collective_s: float = 10e-6
    """Assumed. Latency of a collective inside a node."""
    memory_share: float = 0.8
    """Share of a device's memory that an engine's weights and KV cache may fill."""
    load_s: float = 2.0
    """Assumed. Latency of a weight update through storage."""
    load_bytes_per_s: float = 2e9
    """Assumed. Rate at which an engine reads weights from storage."""
    reward_s: float = 0.1
    """Assumed. Seconds until a finished response has its reward; rewards run side by side."""
    dock_bytes_per_s: float = 50e6
    """Rate of a store's process, serialisation included."""
    message_s: float = 1e-3
    """Assumed. Round trip of a metadata request."""

    def __post_init__(self) -> None:
        for item in fields(self):
            share = item.name in SHARES
            above = share or item.name == "slow_software" or item.name.endswith("_bytes_per_s")
            most = 1.0 if share else math.inf
            finite(f"Costs.{item.name}", getattr(self, item.name), above=above, most=most)


SHARES = ("matmul_efficiency", "memory_efficiency", "link_efficiency", "memory_share")
"""Fields of ``Costs`` above 0 and at most 1."""

FITTED = (
    "train_bytes_per_flop", "decode_overhead_s", "trainer_s_per_sequence", "slow_software",
)  # fmt: skip
"""Fields of ``Costs`` that a fit may change."""
CALIBRATED = ("decode_s_per_row", "contention", "slice_s", "turn_s")
"""Fields of ``Costs`` that only a trace tells of (``rk.sim.fit``); 0 without one."""
SOURCED = {
    "memory_share": "AReaL's benchmark, legacy tag v0.3.1: SGLang's memory fraction",
    "dock_bytes_per_s": "0.04 to 0.05 GB/s: verl-project/verl#2847",
}
"""Fields of ``Costs`` with a public source. All others are assumed."""


KINDS = {
    "model": ModelSpec, "node": Node, "workload": Workload, "generate": Layout, "train": Layout,
    "costs": Costs,
}  # fmt: skip
"""What fields of a run are."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model trained on some devices: who generates, who trains, how each is cut."""

    model: ModelSpec
    node: Node
    num_devices: int
    """All devices."""
    workload: Workload
    rollout_devices: int = 0
    """Devices that only generate; 0: all devices take turns at generating and training."""
    generate: Layout = field(default_factory=Layout)
    """One engine; how many there are follows from the devices."""
    train: Layout = field(default_factory=Layout)
    """The trainer; its dp follows from the devices."""
    sharded: bool = False
    """Weights, gradients and optimizer are cut over all trainers (FSDP, ZeRO-3)."""
    minibatches: int = 1
    """Optimizer steps a train step."""
    chunks: int = 1
    """Pieces in which the trainer takes a step's groups, each as soon as it is there; of use where
    groups come one by one, in asynchronous runs."""
    micro_batch_tokens: int = 32_768
    """Packed tokens of a rank's forward and backward, over the cp devices that share them."""
    cache_bytes: float = 2.0
    """Bytes of a number in the KV cache: 2 for BF16, 1 for FP8."""
    recompute: bool = True
    """Activations are computed again in the backward."""
    forwards: int = 1
    """Forward passes of the trainer a step: proximal and reference logprobs."""
    trained_share: float = 1.0
    """Groups trained of those generated: below 1 under dynamic sampling."""
    dock: "Move | None" = None
    """How samples travel; None: no cost."""
    reshard: "Move | None" = None
    """How weights travel; None: no cost."""
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            instance(f"Run.{name}", getattr(self, name), kind)
        for name in ("num_devices", "minibatches", "chunks", "micro_batch_tokens", *FROM_0):
            whole(f"Run.{name}", getattr(self, name), least=int(name not in FROM_0))
        finite("Run.cache_bytes", self.cache_bytes, above=True)
        finite("Run.trained_share", self.trained_share, above=True, most=1.0)
        for name in ("dock", "reshard"):
            move = getattr(self, name)
            if move is not None and not callable(move):
                raise TypeError(f"Run.{name}: got {move!r}, need one of rk.sim.moves, or None.")
            if move is not None:
                fits(f"Run.{name}", move, "run")
        if self.rollout_devices >= self.num_devices:
            raise ValueError(
                f"rollout_devices: got {self.rollout_devices} of {self.num_devices} devices, need "
                "at least one that trains; 0 shares all of them."
            )
        if self.generate.cp > 1:
            raise ValueError(
                f"Run.generate: got cp={self.generate.cp}, need cp=1: ranks of an engine share no "
                "sequence's tokens. Use tp or ep."
            )
        if self.workload.prompts % self.chunks:
            raise ValueError(
                f"chunks: got {self.chunks} for {self.workload.prompts} prompts, need a divisor."
            )

    @property
    def counts(self) -> Counts:
        """Weights and cache of the model."""
        return counts(self.model)

    @property
    def kv_bytes(self) -> float:
        """Bytes a token keeps in the cache."""
        return self.cache_bytes * self.model.num_layers * self.counts.kv_size

    @property
    def shared(self) -> bool:
        """Whether the same devices generate and train."""
        return self.rollout_devices == 0

    @property
    def train_devices(self) -> int:
        """Devices that train."""
        return self.num_devices - self.rollout_devices

    @property
    def num_engines(self) -> int:
        """Whole engines on the generating devices; 0 if not one fits."""
        return (self.rollout_devices or self.num_devices) // self.generate.num_devices

    @property
    def train_dp(self) -> int:
        """Data-parallel ranks of the trainer; 0 if not one fits."""
        return self.train_devices // (self.train.tp * self.train.pp * self.train.cp)

    @cached_property
    def moments(self) -> tuple[float, float]:
        """Mean prompt + response tokens of a sequence, and the mean of their square."""
        mean, square = self.workload.lengths.moments()
        prompt = self.workload.prompt_tokens
        return mean + prompt, square + 2 * prompt * mean + prompt**2
