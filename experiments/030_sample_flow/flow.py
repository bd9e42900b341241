"""A batch's way through the stages of GRPO, by real processes on their nodes; counted and timed."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch

import rlkit as rk
from rlkit.batch.rows import Rows
from rlkit.dock import GRPO, predicted_traffic
from rlkit.dock.samplers import seeded_random
from rlkit.dock.traffic import DRIVER, SIZES, Stage
from rlkit.dock.transport import Reply

DTYPES = {8: torch.int64, 4: torch.float32, 1: torch.int8}
N = 8  # responses a prompt
WIRE = ("source", "target")


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowConfig:
    """Sizes of the measured runs."""

    nodes: tuple[int, ...] = (1, 2, 4, 8)
    """Raylets of this machine."""
    rows: tuple[int, ...] = (1024, 2048)
    """Rows of a batch."""
    most_rows: int = 8192
    """Rows of the batch that only clusters of at most ``few_nodes`` have memory for."""
    few_nodes: int = 4
    """See ``most_rows``."""
    prompt_tokens: int = 1024
    """Mean length."""
    response_tokens: int = 2048
    """Mean length; rows have between 3/4 of it and 5/4."""
    repeats: int = 2
    """Batches of each kind, after one that warms up."""
    emulated_bytes_per_s: float = 125e6
    """Of a node, both ways together: Ethernet of 1 Gbit/s."""


def lengths_of(uids: np.ndarray, column: str, config: FlowConfig) -> np.ndarray:
    """[N] tokens of rows: a function of uid, even between 3/4 of the mean and 5/4."""
    mean = config.prompt_tokens if column == "prompt_ids" else config.response_tokens
    spread = (uids * 2_654_435_761 % 2**32) / 2**32
    return (mean * (0.75 + 0.5 * spread)).astype(np.int64)


def column_of(name: str, uids: np.ndarray, config: FlowConfig) -> Rows:
    """Zeros of the sizes that rlkit's workers write."""
    size = SIZES[name]
    if size.row:
        return Rows(torch.zeros(len(uids)))
    dtype = DTYPES[int(size.prompt_token + size.response_token)]
    lengths = torch.from_numpy(lengths_of(uids, name, config))
    return Rows(torch.zeros(int(lengths.sum()), dtype=dtype), lengths)


class Station:
    """One process of a node, which does every stage's share of the rows."""

    def node(self) -> str:
        """Its node."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def begin(self, dock: Any, uids: np.ndarray, config: FlowConfig) -> float:
        """Put the prompts, as the driver's node does; seconds."""
        if self.node() != dock.transport.nodes[0]:
            return 0.0
        columns = {"prompt_ids": column_of("prompt_ids", uids, config)}
        start = time.perf_counter()
        dock.put(columns, uids, stage=DRIVER, group_ids=uids // N)
        return time.perf_counter() - start

    def run(self, dock: Any, stage: Stage, n: int, config: FlowConfig, wires: Any) -> float:
        """Lease, read and answer for n rows, and write the stage's columns; seconds."""
        if wires is not None:
            dock = dock.at()
            dock.transport = Wired(dock.transport, wires, config.emulated_bytes_per_s)
        start = time.perf_counter()
        lease = dock.get(stage.name, stage.reads, n, partial(seeded_random, seed=len(stage.name)))
        spent = time.perf_counter() - start
        columns = {name: column_of(name, lease.uids, config) for name in stage.writes}
        start = time.perf_counter()
        if columns:
            dock.put(columns, lease.uids, stage=stage.name)
        dock.ack(lease)
        return spent + time.perf_counter() - start


class Wire:
    """The link of a node, emulated: one transfer at a time, in either direction."""

    def carry(self, seconds: float) -> None:
        """Be busy."""
        time.sleep(seconds)


class Wired:
    """A transport whose values take as long as the links of both nodes need for their bytes."""

    def __init__(self, inner: Any, wires: dict[str, Any], bytes_per_s: float) -> None:
        self.inner, self.wires, self.bytes_per_s = inner, wires, bytes_per_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def warehouses(self, method: str, calls: Any, **options: Any) -> dict[str, Reply]:
        """As the transport does, and then the delay."""
        import ray

        start = time.perf_counter()
        replies = self.inner.warehouses(method, calls, **options)
        if method not in ("fetch", "put"):
            return replies
        found = {node: reply.value for node, reply in replies.items()}
        rows = found if method == "fetch" else {node: args[1] for node, args in calls.items()}
        moved = {node: sum(x.nbytes for x in each.values()) for node, each in rows.items()}
        moved.pop(self.inner.here, None)
        moved[self.inner.here] = sum(moved.values())
        busy = [self.wires[n].carry.remote(b / self.bytes_per_s) for n, b in moved.items() if b]
        ray.get(busy)
        spent = time.perf_counter() - start
        return {node: Reply(value, spent) for node, value in found.items()}


def one_batch(
    dock: Any, group: Any, uids: np.ndarray, config: FlowConfig, wires: Any
) -> dict[str, float]:
    """A batch through all stages; seconds of dispatch, and bytes counted beside predicted."""
    before = dock.traffic()
    dispatch_s = max(listed(group.begin(dock, uids, config)))
    share = len(uids) // len(group)
    for stage in GRPO.stages[1:]:
        dispatch_s += max(listed(group.run(dock, stage, share, config, wires)))
    keys = ["stage", "source", "target"]
    counted = dock.traffic().set_index(keys)["bytes"]
    counted = counted.sub(before.set_index(keys)["bytes"], fill_value=0).reset_index()
    means = [lengths_of(uids, name, config).mean() for name in ("prompt_ids", "response_ids")]
    central = isinstance(dock, rk.CentralDock)
    predicted = predicted_traffic(
        GRPO, len(uids) // N, N, *means, nodes=dock.transport.nodes, central=central
    )
    found = {"dispatch_s": dispatch_s}
    for name, amount in (("all_nodes", everything), ("busiest_node", busiest)):
        moved, told = amount(counted), amount(predicted)
        found |= {f"{name}_bytes": moved, f"{name}_predicted_bytes": told}
        found[f"{name}_error"] = told / moved - 1 if moved else 0.0
    return found


def everything(table: Any) -> float:
    """Bytes put and got, those inside a node, too."""
    return float(table["bytes"].sum())


def busiest(table: Any) -> float:
    """Bytes in and out of the node that has the most, those inside a node left out."""
    away = table[table["source"] != table["target"]]
    sides = [away.groupby(side)["bytes"].sum() for side in WIRE]
    return float(sides[0].add(sides[1], fill_value=0).max()) if len(away) else 0.0


def listed(found: Any) -> list[float]:
    """One result a rank."""
    return found if isinstance(found, list) else [found]


def memory_gib() -> float:
    """Memory of this process's children and theirs, what is shared counted once (PSS)."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:  # it has ended
            continue
    return total / 2**30
