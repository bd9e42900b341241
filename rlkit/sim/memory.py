"""Bytes of a device by category while it generates and while it trains; too many is a result."""

from dataclasses import dataclass
from typing import Any

from rlkit.sim.moves import engine_shard_bytes, moved, train_shard_bytes
from rlkit.sim.work import Run

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by phase and category, what a device has, and how many rows an engine's cache holds."""

    generate: dict[str, float]
    update: dict[str, float]
    limit_bytes: float
    max_rows: int
    """Sequences that one engine runs at once."""
    too_few: str = ""
    """Why not one engine, or not one trainer, has its devices; empty if each has."""

    @property
    def problem(self) -> str:
        """Why the run does not fit: phase, need and limit; empty if it does."""
        if self.too_few:
            return self.too_few
        for phase, parts in (("generate", self.generate), ("update", self.update)):
            total = sum(size for name, size in parts.items() if name != "host_swap")
            if total > self.limit_bytes:
                return (
                    f"{phase}: {total / GIB:.1f} GiB of {self.limit_bytes / GIB:.1f} GiB, "
                    f"{max(parts, key=parts.__getitem__)} the most"
                )
        return "" if self.max_rows else "generate: no room for the cache of one sequence"

    def frame(self) -> Any:
        """DataFrame of phase, category and bytes: ``rk.viz.plot_memory`` draws it."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        phases = {"generate": self.generate, "update": self.update}
        rows = [(p, c, size) for p, parts in phases.items() for c, size in parts.items() if size]
        return pd.DataFrame(rows, columns=["phase", "category", "bytes"])


def memory(run: Run) -> Memory:
    """What one device holds: an engine's when it generates, a trainer's when it trains.

    BF16 weights, FP32 gradients, 12 bytes a weight of optimizer state over the data-parallel ranks
    (Rajbhandari et al., 2020, ZeRO-1), a hidden state a layer and token where activations are
    computed again, else 34 of them (Korthikanti et al., 2022, without the attention's scores).
    """
    model, device = run.model, run.node.device
    weights, reshard = engine_shard_bytes(run), moved(run, "reshard")
    kept = reshard.kept_bytes if run.shared else 0.0
    share = run.costs.memory_share * device.memory_bytes - weights - kept
    devices = run.generate.num_devices
    context = _running_context(run)
    rows = max(0, int(share * devices / (run.kv_bytes * context)))
    most = -(-run.workload.sequences // max(1, run.num_engines))
    used = max(0.0, min(share, most * run.kv_bytes * context / devices))
    generate = {"weights": weights + kept, "kv_cache": used}
    if run.shared and run.reshard:
        generate["host_swap"] = reshard.host_bytes
    shard, dp = train_shard_bytes(run), max(1, run.train_dp * run.train.cp)
    spread_over = run.train.pp * run.train.ep * run.train.tp_of_experts
    experts = 2.0 * run.counts.expert_parameters / spread_over
    expert_dp = max(1, run.train_devices // spread_over)
    spread = shard if run.sharded else (shard - experts) / dp + experts / expert_dp
    layers = model.num_layers / run.train.pp
    hidden = 2.0 * model.hidden_size * run.micro_batch_tokens / (run.train.tp * run.train.cp)
    kept_layers = (layers + 34 / 2) if run.recompute else layers * 34 / 2
    update = {
        "weights": shard,
        "gradients": 2.0 * shard,
        "optimizer": 6.0 * spread,
        "activations": hidden * kept_layers,
    }
    return Memory(generate, update, device.memory_bytes, rows, _too_few(run))


def _too_few(run: Run) -> str:
    """Which phase has fewer devices than its layout takes."""
    there = {
        "generate": (run.generate.num_devices, run.rollout_devices or run.num_devices),
        "update": (run.train.tp * run.train.pp * run.train.cp, run.train_devices),
    }
    for phase, (need, have) in there.items():
        if have < need:
            return f"{phase}: {have} devices, the layout needs {need}"
    return ""


def _running_context(run: Run) -> float:
    """Mean tokens that a running sequence holds: long ones run longer, half done on average."""
    mean, square = run.workload.lengths.moments()
    return run.workload.prompt_tokens + square / (2.0 * mean)
