"""Training shards really leave the memory of a device during generation."""

import gc
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "reshard"))
from toys import FAMILIES, same, shards_of, states_of

from rlkit import device
from rlkit.config import Layout
from rlkit.reshard import allgather_swap, megatron, naive, plan_reshard, reshard_in_process, vllm
from rlkit.reshard.fingerprints import fingerprint

DEVICE = "npu:2"
MODEL, TRAIN, INFER = FAMILIES["qwen3 moe"], Layout(tp=2, pp=2, ep=2), Layout(tp=4)


def on_device(strategy):
    """Shards of eight ranks, all on one device; bytes of the training shards; bytes before them."""
    fingerprint(torch.ones(1, device=DEVICE))  # keeps its factors on the device
    gc.collect()
    before = device.allocated_bytes(DEVICE)
    states = [
        {name: t.to(DEVICE) for name, t in state.items()}
        for state in states_of(MODEL, TRAIN, megatron)
    ]
    plan = plan_reshard(MODEL, TRAIN, INFER, dtype="float32", strategy=strategy)
    size = sum(t.nbytes for state in states for t in state.values())
    assert device.allocated_bytes(DEVICE) - before == size
    return shards_of(plan, states, device=DEVICE), size, before


def generation_bytes(shards) -> int:
    return sum(t.nbytes for s in shards for t in s.generation.values())


def test_allocated_bytes_fall_by_the_size_of_the_training_shards():
    shards, size, start = on_device(allgather_swap)
    reshard_in_process(shards, version=1)
    during = device.allocated_bytes(DEVICE) - start - generation_bytes(shards)
    assert size - during >= 0.9 * size
    for s in shards:
        s.to_training()
    assert device.allocated_bytes(DEVICE) - start >= size
    expected = states_of(MODEL, TRAIN, megatron)
    found = [{name: t.cpu() for name, t in s.training.items()} for s in shards]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_without_the_swap_they_do_not_fall():
    shards, size, start = on_device(naive)
    reshard_in_process(shards, version=1)
    assert device.allocated_bytes(DEVICE) - start - generation_bytes(shards) >= size


def test_three_cycles_hold_the_same():
    shards, _, start = on_device(allgather_swap)
    held = []
    for version in (1, 2, 3):
        reshard_in_process(shards, version=version)
        held.append(device.allocated_bytes(DEVICE) - start)
        for s in shards:
            s.to_training()
    assert held == pytest.approx([held[0]] * 3, rel=0.01)
    reshard_in_process(shards, version=4)
    expected = states_of(MODEL, INFER, vllm, devices=8)
    found = [{name: t.cpu() for name, t in s.generation.items()} for s in shards]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def test_host_copies_are_pinned():
    shards, _, _ = on_device(allgather_swap)
    reshard_in_process(shards, version=1)
    assert all(host.is_pinned() for s in shards for host in s._swap._hosts)
    assert isinstance(shards[0]._swap._hosts[0], torch.Tensor)
