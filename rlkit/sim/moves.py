"""How samples and weights travel: functions of a run that a user may replace by his own.

Bytes are those of the plans that real runs carry out: ``rlkit.dock.predicted_traffic`` and
``rlkit.reshard.plan_reshard``. A run adds rates.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from rlkit.checks import finite, instance
from rlkit.config import Layout, ModelSpec
from rlkit.dock.traffic import GRPO, predicted_traffic
from rlkit.reshard import plan_strategies as strategies
from rlkit.reshard.plan_cells import Cut
from rlkit.reshard.plan_forms import megatron, vllm
from rlkit.reshard.plan_layouts import MakeForm, plan_reshard
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_ranks import Side
from rlkit.reshard.plan_tables import parameters
from rlkit.sim.cost import Cost
from rlkit.sim.work import Run, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What one move costs, and what it leaves on a device."""

    cost: Cost
    """Seconds, all devices at once."""
    num_bytes: float
    """Bytes that cross a link, all devices together."""
    kept_bytes: float = 0.0
    """Training weights that stay on each device during generation though nobody reads them."""
    host_bytes: float = 0.0
    """What lies in each device's share of host memory meanwhile."""

    def __post_init__(self) -> None:
        instance("Moved.cost", self.cost, Cost)
        finite("Moved.cost.seconds", self.cost.seconds)
        for name in ("num_bytes", "kept_bytes", "host_bytes"):
            finite(f"Moved.{name}", getattr(self, name))


Move = Callable[[Run], Moved]
"""A way to move samples, or weights, once a train step."""


def moved(run: Run, name: str) -> Moved:
    """What the run's ``dock`` or ``reshard`` takes; nothing if it has none."""
    move = getattr(run, name)
    found = move(run) if move else Moved(cost=Cost(), num_bytes=0.0)
    if not isinstance(found, Moved):
        raise TypeError(
            f"Run.{name}: got {found!r} from {getattr(move, '__name__', move)}(run), need a Moved. "
            "Return rk.sim.moves.Moved(cost=rk.sim.cost.Cost(network_s=...), num_bytes=...)."
        )
    return found


@lru_cache(maxsize=64)
def dock_bytes(workload: Workload, num_nodes: int, *, central: bool) -> tuple[float, float]:
    """Bytes of GRPO's samples a step: in and out of the busiest node, and between all nodes."""
    lengths = workload.prompt_tokens, workload.lengths.mean_tokens
    nodes = [f"node{i}" for i in range(num_nodes)]
    frame = predicted_traffic(
        GRPO, workload.prompts, workload.samples, *lengths, nodes=nodes, central=central
    )
    away = frame[frame["source"] != frame["target"]]
    out, into = frame.groupby("source")["bytes"].sum(), away.groupby("target")["bytes"].sum()
    return float(out.add(into, fill_value=0.0).max()), float(away["bytes"].sum())


def central(run: Run) -> Moved:
    """All samples through one process."""
    return _through_dock(run, central=True)


def distributed(run: Run) -> Moved:
    """A warehouse a node, which holds what was made there."""
    return _through_dock(run, central=False)


def _through_dock(run: Run, *, central: bool) -> Moved:
    """The busiest node's bytes at the store's rate; each stage asks once a data-parallel rank."""
    nodes = max(1, -(-run.num_devices // run.node.num_devices))
    busiest, away = dock_bytes(run.workload, nodes, central=central)
    asked_s = len(GRPO.consumers) * max(1, run.train_dp) * run.costs.message_s
    cost = Cost(network_s=busiest / run.costs.dock_bytes_per_s, other_s=asked_s)
    return Moved(cost=cost, num_bytes=away)


@lru_cache(maxsize=1024)
def shard_bytes(model: ModelSpec, layout: Layout, form: MakeForm) -> float:
    """BF16 weights of the fullest device of a layout."""
    whole, table = layout.on(layout.num_devices), parameters(model, dtype="bfloat16")
    return float(Side(model, table, whole, form(model, whole)).nbytes(table).max())


def train_shard_bytes(run: Run) -> float:
    """BF16 weights that one trainer holds."""
    if run.sharded:
        return run.counts.weight_bytes / max(1, run.train_devices)
    return shard_bytes(run.model, run.train, megatron)


def engine_shard_bytes(run: Run) -> float:
    """BF16 weights that one generating device holds."""
    return shard_bytes(run.model, run.generate, vllm)


@lru_cache(maxsize=256)
def _received(
    model: ModelSpec, train: Layout, infer: Layout, strategy: Callable[[Cut], ReshardPlan]
) -> float:
    """Mean bytes a device gets from others, on the fewest devices that both layouts fit on."""
    plan = plan_reshard(model, train, infer, strategy=strategy)
    return plan.nbytes / plan.cut.num_devices


def _gathered(run: Run, strategy: Callable[[Cut], ReshardPlan]) -> Moved:
    """Between layouts on the same devices. FSDP's shards have no plan: all but its own is got."""
    if run.sharded:
        size = max(0.0, engine_shard_bytes(run) - train_shard_bytes(run))
    else:
        layouts = (replace(layout, dp=None) for layout in (run.train, run.generate))
        size = _received(run.model, *layouts, strategy)
    inside = run.train.tp * run.train.pp <= run.node.num_devices
    rate = run.node.link_bytes_per_s if inside else run.node.network_bytes_per_s
    cost = Cost(network_s=size / (run.costs.link_efficiency * rate))
    return Moved(cost=cost, num_bytes=size * run.num_devices)


def naive(run: Run) -> Moved:
    """Gather tensors whole and keep the training weights beside the engine's."""
    return replace(_gathered(run, strategies.naive), kept_bytes=train_shard_bytes(run))


def allgather_swap(run: Run) -> Moved:
    """Gather shards into the engine's buffers; the trainer's to the host, and back to train."""
    moved, kept = _gathered(run, strategies.allgather_swap), train_shard_bytes(run)
    swap = Cost(other_s=2.0 * kept / run.node.device.host_bytes_per_s)
    return replace(moved, cost=moved.cost + swap, host_bytes=kept)


def broadcast(run: Run) -> Moved:
    """From trainers to engines on other devices, in buckets that pass along the engines."""
    size = engine_shard_bytes(run)
    seconds = size / (run.costs.link_efficiency * run.node.network_bytes_per_s)
    engines = run.num_engines * run.generate.num_devices
    return Moved(cost=Cost(network_s=seconds), num_bytes=size * engines)


def through_storage(run: Run) -> Moved:
    """A checkpoint is written, and every engine reads it (AReaL v0.3)."""
    size = run.counts.weight_bytes
    seconds = run.costs.load_s + size / run.costs.load_bytes_per_s
    return Moved(cost=Cost(other_s=seconds), num_bytes=size * max(1, run.num_engines))


def fixed(seconds: float) -> Move:
    """A move that takes so long whatever the run: one that was measured."""
    return _Fixed(finite("seconds", seconds))


@dataclass(frozen=True, slots=True)
class _Fixed:
    seconds: float

    def __call__(self, run: Run) -> Moved:
        return Moved(cost=Cost(other_s=self.seconds), num_bytes=0.0)
