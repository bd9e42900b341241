"""How samples and weights travel: functions of a run that a user may replace by his own."""

from collections.abc import Callable
from dataclasses import dataclass

from rlkit.sim.cost import Cost
from rlkit.sim.work import Run


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


Move = Callable[[Run], Moved]
"""A way to move samples, or weights, once a train step."""


def dock_bytes(run: Run) -> float:
    """Bytes of GRPO's samples in and out of the store a step, 4 a number.

    Puts 2 P + 6 T, gets 5 P + 14 T tokens a sequence of P prompt and T response tokens, read off
    the columns that MindSpeed-RL's stages read and write; no published formula.
    """
    prompt = run.workload.prompt_tokens
    response = run.moments[0] - prompt
    return 4.0 * run.workload.sequences * (7.0 * prompt + 20.0 * response)


def central(run: Run) -> Moved:
    """All samples through one process."""
    size = dock_bytes(run)
    return Moved(
        cost=Cost(network_s=size / run.costs.dock_bytes_per_s, other_s=_metadata_s(run)),
        num_bytes=size,
    )


def distributed(run: Run) -> Moved:
    """A warehouse a node: its puts are local, a share of 1 / nodes of the gets, too."""
    nodes = max(1, -(-run.num_devices // run.node.num_devices))
    size = dock_bytes(run)
    seconds = size / nodes / run.costs.dock_bytes_per_s
    away = size * 19.0 / 27.0 * (nodes - 1) / nodes  # gets are 19 of 27 tokens where P = T
    return Moved(cost=Cost(network_s=seconds, other_s=_metadata_s(run)), num_bytes=away)


def _metadata_s(run: Run) -> float:
    """Six stages ask once a data-parallel rank, side by side but for the controller."""
    return 6.0 * max(1, run.train_dp) * run.costs.message_s


def train_shard_bytes(run: Run) -> float:
    """BF16 weights that one trainer holds."""
    model, cut = run.model, run.train
    if run.sharded:
        return model.weight_bytes / max(1, run.train_devices)
    experts = 2.0 * model.expert_parameters / (cut.tp * cut.pp * run.train_ep)
    return model.dense_bytes / (cut.tp * cut.pp) + experts


def engine_shard_bytes(run: Run) -> float:
    """BF16 weights that one generating device holds."""
    model, cut = run.model, run.generate
    return model.dense_bytes / cut.tp + 2.0 * model.expert_parameters / cut.num_devices


def naive(run: Run) -> Moved:
    """Gather into new buffers and keep the training weights beside them."""
    gathered = engine_shard_bytes(run)
    cost = Cost(network_s=gathered / _gather_rate(run))
    size = gathered * run.num_devices
    return Moved(cost=cost, num_bytes=size, kept_bytes=train_shard_bytes(run))


def allgather_swap(run: Run) -> Moved:
    """Gather into the engine's buffers; training weights to the host, and back before training."""
    kept, gathered = train_shard_bytes(run), naive(run)
    swap_s = 2.0 * kept / run.node.device.host_bytes_per_s
    return Moved(
        cost=gathered.cost + Cost(other_s=swap_s),
        num_bytes=gathered.num_bytes,
        host_bytes=kept,
    )


def broadcast(run: Run) -> Moved:
    """From trainers to engines on other devices, in buckets that pass along the engines."""
    size = run.model.weight_bytes
    seconds = engine_shard_bytes(run) / (run.costs.link_efficiency * run.node.network_bytes_per_s)
    return Moved(cost=Cost(network_s=seconds), num_bytes=size * max(1, run.num_engines))


def through_storage(run: Run) -> Moved:
    """A checkpoint is written, and every engine reads it (AReaL v0.3)."""
    size = run.model.weight_bytes
    seconds = run.costs.load_s + size / run.costs.load_bytes_per_s
    return Moved(cost=Cost(other_s=seconds), num_bytes=size * max(1, run.num_engines))


def _gather_rate(run: Run) -> float:
    inside = run.train.tp * run.train.pp <= run.node.num_devices
    rate = run.node.link_bytes_per_s if inside else run.node.network_bytes_per_s
    return run.costs.link_efficiency * rate
