"""Reshards of a small model over gloo, four processes of this machine."""

import functools
import statistics
import time
from typing import Any

import torch
from cases import MEASURED, RANKS, Measured, small
from torch import multiprocessing

from rlkit import device
from rlkit.reshard import Shards, allgather_swap, direct, naive, plan_reshard, reshard_over
from rlkit.trace import storage_bytes

STRATEGIES = (naive, allgather_swap, direct)


def rows(config: Measured) -> list[dict[str, Any]]:
    """A row a strategy and metric; of the rank for which it is largest."""
    spawn = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=rank_main, args=(rank, store.port, queue, config))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        found = [queue.get(timeout=900) for _ in processes]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    return [
        {"run": run, "metric": metric, "unit": unit, "value": max(each[key] for each in found)}
        for key in found[0]
        for run, metric, unit in [key]
    ]


def rank_main(rank: int, port: int, queue: Any, config: Measured) -> None:
    """Measure every strategy on one rank."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    group = device.process_group("cpu", store=store, rank=rank, size=RANKS, timeout_s=300)
    found: dict[tuple[str, str, str], float] = {}
    for strategy in STRATEGIES:
        for (metric, unit), value in one(strategy, rank, group, config).items():
            found[strategy.__name__, metric, unit] = value
    queue.put(found)


def one(strategy: Any, rank: int, group: Any, config: Measured) -> dict[tuple[str, str], float]:
    """Metrics of one strategy on one rank."""
    sized = functools.partial(strategy, bucket_mib=config.bucket_mib)
    plan = plan_reshard(small(config.mib), *MEASURED, devices=RANKS, strategy=sized)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)).normal_()
        for name, shape, dtype in plan.cut.train.tensors(rank)
    }
    shards, out, back = Shards(plan, rank, tensors), [], []
    for version in range(config.repeats + 1):
        group.barrier().wait()
        report = reshard_over(group, shards, version=version)
        out.append(report.seconds)
        residual = storage_bytes(shards.training.values())
        start = time.perf_counter()
        shards.to_training()
        back.append(time.perf_counter() - start)
    return {
        ("seconds to generation", "s"): statistics.median(out[1:]),
        ("seconds to training", "s"): statistics.median(back[1:]),
        ("moved, all devices", "GB"): report.bytes / 1e9,
        ("peak", "GiB"): report.peak_gib,
        ("peak, planned", "GiB"): plan.peak_bytes() / 2**30,
        ("residual", "GiB"): residual / 2**30,
    }
