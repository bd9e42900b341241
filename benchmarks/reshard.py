"""What resharding costs: seconds over those of a plain transfer of the same bytes in the same run.

    python benchmarks/reshard.py --mib 256 --ranks 2 4

Processes of this machine over gloo, one thread each. A plain transfer moves the plan's bytes
between the same pairs of ranks in the same buckets: all receives and sends of a bucket at once, a
message a peer, and copies of what stays on its device. It reads memory as large as the training
shards and fills memory as large as generation's, in order, as resharding must: a small buffer used
again and again would stay in the processor's cache. Of a plan that swaps it also copies to other
buffers and back, and makes the tensors of generation anew. It does nothing else. Resharding also
cuts, packs and unpacks what does not lie in one run, in a message a large piece, and with checks
takes the fingerprints of both ends. They take turns, and the quickest time of each counts, for
other jobs only add to it. The second table says what the ratio with checks consists of: seconds of
the thread that reshards, in each of PHASES, over those of the plain transfer.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
from torch import multiprocessing

from rlkit import device
from rlkit.config import Layout, ModelSpec
from rlkit.reshard import (
    HostSwap,
    Shards,
    allgather_swap,
    direct,
    exchange,
    naive,
    plan_reshard,
    reshard_over,
)
from rlkit.reshard import run as running

STRATEGIES = {"naive": naive, "allgather_swap": allgather_swap, "direct": direct}
GOAL = 1.3
PHASES: dict[str, list[tuple[Any, str]]] = {
    "allocate": [(Shards, "begin"), (Shards, "buffer")],
    "pack, unpack": [(exchange, "pack"), (exchange, "unpack")],
    "copy": [(running, "_copy")],
    "fingerprints": [(exchange.Frame, "fingerprints")],
    "swap": [(Shards, "swap_out"), (Shards, "to_training")],
}
"""Functions of a reshard by what they do; the rest is mostly waiting for messages."""


class Times(NamedTuple):
    """Seconds of one body: on the clock, and of processor time, which other jobs touch less."""

    wall: float
    cpu: float


def model_of(mib: float) -> ModelSpec:
    """A Qwen2-like model of about so many MiB in bf16, a quarter of them embeddings."""
    layers, width = 8, 64
    while 2 * make(layers, width + 64).num_parameters <= mib * 2**20:
        width += 64
    return make(layers, width)


def make(layers: int, width: int) -> ModelSpec:
    return ModelSpec(
        vocab_size=12 * width, hidden_size=width, intermediate_size=4 * width, num_layers=layers,
        num_heads=8, num_kv_heads=4, head_dim=width // 8, qkv_bias=True,
    )  # fmt: skip


def layouts(ranks: int) -> tuple[Layout, Layout]:
    """Training and generation: tensor and pipeline parallel to whole copies."""
    return Layout(tp=min(2, ranks), pp=max(1, ranks // 2)), Layout()


def timed(group, repeats: int, *bodies: Callable[[], object]) -> list[Times]:
    """Least times of each body, which take turns; the slowest rank counts."""
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MAX
    found: list[list[list[float]]] = [[] for _ in bodies]
    for repeat in range(repeats + 1):
        for times, body in zip(found, bodies, strict=True):
            group.barrier().wait()
            wall, cpu = time.perf_counter(), time.process_time()
            body()
            both = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            group.allreduce([both], options).wait()
            if repeat:  # the first touches memory for the first time
                times.append(both.tolist())
    return [Times(*map(min, zip(*times, strict=True))) for times in found]


def plain(group, shards: Shards) -> Callable[[], None]:
    """The plan's bytes from as much memory as training's to as much as generation's."""
    rank, share, swaps = shards.rank, shards.share, shards.plan.swaps
    generation = list(shards.begin().values())
    sizes = [
        [
            [(m.peer, m.nbytes) for m in messages.get(bucket, [])]
            for messages in (share.incoming, share.outgoing)
        ]
        for bucket in range(share.num_buckets)
    ]
    most = max(n for pairs in sizes for each in pairs for _, n in each)
    outbox, inbox = (
        torch.ones(max(most, sum(t.nbytes for t in tensors)), dtype=torch.uint8)
        for tensors in (shards.training.values(), generation)
    )

    def run() -> None:
        if swaps:
            for fresh in [torch.empty_like(tensor) for tensor in generation]:
                fresh.view(-1).view(torch.uint8)[::4096] = 1  # a page of memory each
        into, out = Cursor(inbox), defaultdict(lambda: Cursor(outbox))  # a peer each
        for bucket, both in enumerate(sizes):
            incoming, outgoing = ([each for each in pairs if each[0] != rank] for pairs in both)
            works = [group.recv([into.next(n)], peer, bucket) for peer, n in incoming]
            works += [group.send([out[peer].next(n)], peer, bucket) for peer, n in outgoing]
            for _, n in (each for each in both[0] if each[0] == rank):
                into.next(n).copy_(out[rank].next(n))
            for work in works:
                work.wait()

    return run


class Cursor:
    """Goes through a buffer, and begins again where the rest of it is too short."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat, self.start = flat, 0

    def next(self, size: int) -> torch.Tensor:
        """The next ``size`` bytes."""
        start = self.start if self.start + size <= len(self.flat) else 0
        self.start = start + size
        return self.flat[start : self.start]


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Seconds that this thread spends in each of ``PHASES``."""
    spent = dict.fromkeys(PHASES, 0.0)

    def timed_call(phase: str, call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[phase] += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for phase, places in PHASES.items():
            for place, name in places:
                call = timed_call(phase, getattr(place, name))
                stack.enter_context(mock.patch.object(place, name, call))
        yield spent


def phases(group, repeats: int, body: Callable[[], object]) -> dict[str, float]:
    """Seconds by phase of this rank, of the quickest time."""
    found = []
    for _ in range(repeats):
        group.barrier().wait()
        start = time.perf_counter()
        with watched() as spent:
            body()
        found.append(spent | {"rest": time.perf_counter() - start - sum(spent.values())})
    return min(found, key=lambda spent: sum(spent.values()))


def swap_times(group, tensors: dict[str, torch.Tensor], repeats: int) -> list[Times]:
    """Times of copies out and back between ready buffers, and of the swap."""
    swap = HostSwap(tensors)
    here = torch.ones(sum(t.nbytes for t in tensors.values()), dtype=torch.uint8)
    there = here.clone()
    return timed(
        group,
        repeats,
        lambda: (there.copy_(here), here.copy_(there)),
        lambda: (swap.out(), swap.back()),
    )


def measure(rank: int, ranks: int, port: int, queue, args: argparse.Namespace) -> None:
    """One rank of one size: rows go to the parent from rank 0."""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
    group = device.process_group("cpu", store=store, rank=rank, size=ranks, timeout_s=300)
    model, rows, shares = model_of(args.mib), [], []
    for name, strategy in STRATEGIES.items():
        sized = partial(strategy, bucket_mib=args.bucket_mib)
        plan = plan_reshard(model, *layouts(ranks), devices=ranks, strategy=sized)
        tensors = {
            name: torch.ones(shape, dtype=getattr(torch, dtype)).normal_()
            for name, shape, dtype in plan.cut.train.tensors(rank)
        }
        shards = Shards(plan, rank, tensors)

        def reshard(check: bool, shards: Shards = shards) -> None:
            reshard_over(group, shards, version=1, check=check)
            shards.to_training()

        bare, unchecked, checked = timed(
            group, args.repeats, plain(group, shards), lambda: reshard(False), lambda: reshard(True)
        )
        memcpy, swap = swap_times(group, tensors, args.repeats)
        for i, kind in enumerate(Times._fields):
            ideal = bare[i] + (memcpy[i] if plan.swaps else 0)
            rows.append(
                {"ranks": ranks, "strategy": name, "MB moved": plan.nbytes / 1e6, "seconds": kind,
                 "plain": bare[i], "reshard": unchecked[i], "with checks": checked[i],
                 "copies": memcpy[i], "swap": swap[i], "ratio": unchecked[i] / ideal,
                 "ratio with checks": checked[i] / ideal, "ratio of swap": swap[i] / memcpy[i]}
            )  # fmt: skip
        parts = phases(group, args.repeats, lambda: reshard(True))
        ideal = bare.wall + (memcpy.wall if plan.swaps else 0)
        shares.append(
            {"ranks": ranks, "strategy": name} | {k: part / ideal for k, part in parts.items()}
        )
        del shards, tensors
    if rank == 0:
        queue.put((rows, shares))


def run(ranks: int, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Rows of both tables of one number of ranks."""
    spawn = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    queue = spawn.Queue()
    processes = [
        spawn.Process(target=measure, args=(rank, ranks, store.port, queue, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return queue.get(timeout=900)
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=float, default=256, help="size of the model in bf16")
    parser.add_argument("--bucket-mib", type=float, default=64, help="of both kinds of transfer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="2 or 4")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for rows in zip(*(run(ranks, args) for ranks in args.ranks), strict=True):
        frame = pd.concat(map(pd.DataFrame, rows))
        print(frame.round(3).to_string(index=False))
    print(f"goal: ratios of at most {GOAL}")


if __name__ == "__main__":
    main()
