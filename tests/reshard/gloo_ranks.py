"""What each of four processes does in test_gloo.py; results go to the test over a queue."""

import functools
import time
import traceback

import torch
from toys import FAMILIES, same, states_of

from rlkit import device
from rlkit.config import Layout
from rlkit.reshard import (
    Shards,
    allgather_swap,
    direct,
    megatron,
    naive,
    pieces,
    plan_reshard,
    reshard_over,
    vllm,
)

LARGE = pieces.LARGE
RANKS = 4
SMALL = functools.partial(direct, bucket_mib=600 / 2**20)
SMALL_SWAP = functools.partial(allgather_swap, bucket_mib=600 / 2**20)
CASES = {
    "TP2 PP2 to TP1": ("llama", Layout(tp=2, pp=2), Layout(), SMALL_SWAP),
    "uneven PP to TP4": ("qwen2", Layout(pp=2, stages=(3, 1)), Layout(tp=4), SMALL),
    "TP1 to TP4, tied": ("qwen2 tied", Layout(), Layout(tp=4), SMALL),
    "experts over TP to EP4": ("qwen3 moe", Layout(tp=2, ep=4, expert_tp=1, dp=2), Layout(ep=4),
                               allgather_swap),
    "PP4 to TP2 EP2": ("deepseek", Layout(pp=4), Layout(tp=2, ep=2), naive),
    "CP2 to PP2": ("qwen3", Layout(tp=2, cp=2), Layout(pp=2), SMALL),
}  # fmt: skip


def main(rank: int, port: int, queue) -> None:
    """Join two groups, the second of little patience, and do all the work."""
    torch.set_num_threads(1)
    try:
        store = torch.distributed.TCPStore("127.0.0.1", port, None, False)
        group, hasty = (
            device.process_group(
                "cpu",
                store=torch.distributed.PrefixStore(str(timeout_s), store),
                rank=rank,
                size=RANKS,
                timeout_s=timeout_s,
            )
            for timeout_s in (60, 2)
        )
        queue.put((rank, (six_layouts(rank, group), damaged(rank, group), absent(rank, hasty))))
    except BaseException:
        queue.put((rank, traceback.format_exc()))
        raise


def shards_of(case: str, rank: int) -> Shards:
    family, train, infer, strategy = CASES[case]
    model = FAMILIES[family]
    plan = plan_reshard(model, train, infer, devices=RANKS, strategy=strategy, dtype="float32")
    return Shards(plan, rank, states_of(model, train, megatron, devices=RANKS)[rank])


def six_layouts(rank: int, group) -> dict:
    """By case: whether generation and training tensors are what they should be, and bytes."""
    found = {}
    for i, (case, (family, train, infer, _)) in enumerate(CASES.items()):
        pieces.LARGE = 64 if i % 2 else LARGE  # so that some of toys travel in place
        shards = shards_of(case, rank)
        report = reshard_over(group, shards, version=3, elementwise=True)
        arrived = same(
            shards.generation, states_of(FAMILIES[family], infer, vllm, devices=RANKS)[rank]
        )
        shards.to_training()
        back = same(
            shards.training, states_of(FAMILIES[family], train, megatron, devices=RANKS)[rank]
        )
        found[case] = arrived, back, report.bytes == shards.plan.nbytes, shards.version
    return found


class FlipsABit:
    """A group whose rank 1 changes one element of the first message that it sends to rank 0."""

    def __init__(self, group, rank: int) -> None:
        self.group, self.armed = group, rank == 1

    def send(self, tensors, peer, tag):
        if self.armed and peer == 0:
            self.armed, tensors = False, [tensors[0].clone()]
            tensors[0][4] ^= 1
        return self.group.send(tensors, peer, tag)

    def __getattr__(self, name):
        return getattr(self.group, name)


def damaged(rank: int, group) -> tuple:
    """Errors with fingerprints, then element by element; then a reshard that succeeds."""
    pieces.LARGE = LARGE
    shards, errors = shards_of("TP2 PP2 to TP1", rank), []
    for elementwise in (False, True):
        try:
            flips = FlipsABit(group, rank)
            reshard_over(flips, shards, version=7, elementwise=elementwise)
        except RuntimeError as error:
            errors.append(str(error))
    version = shards.version
    return errors, version, reshard_over(group, shards, version=8).version


def absent(rank: int, group) -> tuple:
    """Rank 1 sends nothing."""
    shards = shards_of("TP2 PP2 to TP1", rank)
    if rank == 1:
        time.sleep(4)  # longer than the others wait
        return "", 0
    try:
        reshard_over(group, shards, version=7)
    except RuntimeError as error:
        return str(error), shards.version
    return "no error", shards.version
