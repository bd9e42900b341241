"""Training shards leave the device during generation and come back as they were."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from toys import FAMILIES, move, same, shards_of, states_of

from rlkit.config import Layout
from rlkit.reshard import (
    HostSwap,
    allgather_swap,
    megatron,
    naive,
    plan_reshard,
    reshard_in_process,
)

MODEL, TRAIN, INFER = FAMILIES["llama"], Layout(tp=2, pp=2), Layout(tp=4)


def storages(states) -> list[StorageWeakRef]:
    return [StorageWeakRef(t.untyped_storage()) for s in states for t in s.values()]


def test_storages_of_training_shards_are_gone_during_generation_and_come_back_bit_equal():
    states = states_of(MODEL, TRAIN, megatron)
    watched = storages(states)
    plan, shards, _ = move(MODEL, TRAIN, INFER, states, strategy=allgather_swap)
    assert all(watch.expired() for watch in watched)
    assert [s.memory()["weights"] for s in shards] == plan.memory().query(
        "phase == 'generate' and part == 'generation'"
    )["bytes"].tolist()
    for s in shards:
        s.to_training()
    fresh = states_of(MODEL, TRAIN, megatron)
    assert all(same(s.training, state) for s, state in zip(shards, fresh, strict=True))
    assert all(s.memory()["weights"] > 0 for s in shards)


def test_generation_tensors_are_gone_in_training():
    states = states_of(MODEL, TRAIN, megatron)
    _, shards, _ = move(MODEL, TRAIN, INFER, states, strategy=allgather_swap)
    watched = storages([s.generation for s in shards])
    for s in shards:
        s.to_training()
    assert all(watch.expired() for watch in watched)
    with pytest.raises(RuntimeError, match="no whole generation weights, because they are not"):
        _ = shards[0].generation


def test_without_the_swap_both_copies_stay():
    states = states_of(MODEL, TRAIN, megatron)
    watched = storages(states)
    _, shards, _ = move(MODEL, TRAIN, INFER, states, strategy=naive)
    shards[0].to_training()
    assert not any(watch.expired() for watch in watched)
    assert shards[0].generation


def test_host_memory_is_the_same_in_every_cycle():
    plan = plan_reshard(MODEL, TRAIN, INFER, dtype="float32")
    shards, found = shards_of(plan, states_of(MODEL, TRAIN, megatron)), []
    for version in (1, 2, 3):
        reshard_in_process(shards, version=version)
        found.append([s.memory() for s in shards])
        for s in shards:
            s.to_training()
    assert found[0] == found[1] == found[2]


def test_views_of_one_buffer_are_views_of_it_again():
    """As Megatron keeps parameters: one buffer, which something else names too."""
    flat = torch.randn(100)
    views = {"a": flat[:40].view(4, 10), "b": flat[40:]}
    before, swap = flat.clone(), HostSwap(views)
    assert swap.out() == 400
    assert flat.untyped_storage().nbytes() == 0
    swap.back()
    assert torch.equal(flat, before)
    flat[0] = 5
    assert views["a"][0, 0] == 5


def test_a_parameter_stays_the_one_that_its_optimizer_knows():
    linear = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    swap, before = HostSwap(dict(linear.named_parameters())), linear.weight.detach().clone()
    swap.out()
    assert linear.weight.numel() == 0
    swap.back()
    linear(torch.ones(3)).sum().backward()
    optimizer.step()
    assert torch.equal(linear.weight, before - 1)


def test_tensors_go_bucket_by_bucket():
    tensors = {str(i): torch.randn(100) for i in range(5)}  # 400 bytes each
    swap = HostSwap(tensors, bucket_mib=900 / 2**20)
    assert [len(bucket) for bucket in swap._buckets()] == [2, 2, 1]
    assert swap.out() == 2000


class NoHostMemory(HostSwap):
    """Fails in its second bucket."""

    def _host(self, i, bucket):
        if i == 1:
            raise MemoryError("no host memory")
        return super()._host(i, bucket)


def test_a_swap_that_fails_half_way_leaves_everything_on_the_device():
    tensors = {str(i): torch.randn(100) for i in range(5)}
    before = {name: t.clone() for name, t in tensors.items()}
    with pytest.raises(MemoryError):
        NoHostMemory(tensors, bucket_mib=900 / 2**20).out()
    assert same(tensors, before)


def test_swapping_out_twice_is_an_error():
    swap = HostSwap({"a": torch.ones(3)})
    swap.out()
    with pytest.raises(RuntimeError, match="in host memory already; call back"):
        swap.out()
