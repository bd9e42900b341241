"""rlkit.device counts, limits, moves and frees the memory of a device."""

import gc

import npu_device
import pytest
import torch
from small_models import make_model

from rlkit import device

MIB = 2**20


@pytest.fixture
def start():
    """Bytes allocated on npu:2 when the test begins."""
    gc.collect()
    device.reset_peak("npu:2")
    return device.allocated_bytes("npu:2")


def test_allocated_bytes_are_those_of_live_tensors(start):
    kept = torch.zeros(MIB, dtype=torch.uint8, device="npu:2")
    assert device.allocated_bytes("npu:2") - start == kept.nbytes
    del kept
    assert device.allocated_bytes("npu:2") == start


def test_devices_count_apart(start):
    kept = torch.zeros(MIB, dtype=torch.uint8, device="npu:3")
    assert device.allocated_bytes("npu:2") == start
    assert device.allocated_bytes(kept.device) >= MIB


def test_the_peak_stays_until_it_is_reset(start):
    torch.zeros(3 * MIB, dtype=torch.uint8, device="npu:2")
    kept = torch.zeros(MIB, dtype=torch.uint8, device="npu:2")
    assert device.peak_bytes("npu:2") - start == 3 * MIB
    device.reset_peak("npu:2")
    assert device.peak_bytes("npu:2") - start == kept.nbytes


def test_more_than_the_device_holds_is_out_of_memory(start):
    with npu_device.limit(start + MIB):
        assert device.total_bytes("npu:2") == start + MIB
        kept = torch.zeros(MIB - 8, dtype=torch.uint8, device="npu:2")
        with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
            torch.zeros(16, dtype=torch.uint8, device="npu:2")
        del kept
        torch.zeros(16, dtype=torch.uint8, device="npu:2")


def test_a_step_that_ran_out_of_memory_can_run_again(start):
    weight = torch.ones(64, 64, device="npu:2", requires_grad=True)
    inputs = torch.ones(128, 64, device="npu:2")
    with npu_device.limit(device.allocated_bytes("npu:2") + 40_000):
        with pytest.raises(torch.OutOfMemoryError):
            (inputs @ weight).exp().sum().backward()
        (inputs[:8] @ weight).exp().sum().backward()
    assert weight.grad is not None


def test_synchronize_and_empty_cache_know_the_device():
    device.synchronize("npu")
    device.synchronize(torch.device("npu", 2))
    device.empty_cache("npu:2")


def test_a_side_stream_is_left_after_the_body():
    main = torch.npu.current_stream("npu:0")
    with device.side_stream("npu:0"):
        assert torch.npu.current_stream("npu:0") != main
        made = torch.ones(2, device="npu")
    assert torch.npu.current_stream("npu:0") == main
    assert made.tolist() == [1, 1]


def test_pinned_memory_is_host_memory_of_the_same_numbers():
    plain = torch.arange(4.0)
    pinned = device.pin(plain, "npu")
    assert pinned.is_pinned()
    assert not plain.is_pinned()
    assert torch.equal(pinned, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_what_comes_back_from_the_host_is_equal_bit_by_bit(dtype, start):
    tensor = torch.randn(100, 70, device="npu:2").mul(100).to(dtype).t()[::2]
    before, bits = device.allocated_bytes("npu:2"), tensor.cpu()
    host = device.offload(tensor)
    assert before - device.allocated_bytes("npu:2") == 100 * 70 * bits.element_size()
    assert host.is_pinned()
    device.onload(tensor, host)
    assert device.allocated_bytes("npu:2") == before
    assert torch.equal(tensor.cpu(), bits)


def test_a_model_and_its_optimizer_go_to_the_host_and_train_on(start):
    decoder = make_model().build(device="npu:2")
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)

    def step():
        sum(p.square().sum() for p in decoder.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: p.cpu() for name, p in decoder.weights().items()}

    step()
    state = [x for s in optimizer.state.values() for x in s.values() if x.device.type == "npu"]
    tensors = [p.data for p in decoder.parameters()] + state
    before, weights = device.allocated_bytes("npu:2"), step()
    hosts = [device.offload(tensor) for tensor in tensors]
    assert device.allocated_bytes("npu:2") == start
    for tensor, host in zip(tensors, hosts, strict=True):
        device.onload(tensor, host)
    assert device.allocated_bytes("npu:2") == before
    assert all(torch.equal(p.cpu(), weights[name]) for name, p in decoder.weights().items())
    moved = step()
    assert all(not torch.equal(moved[name], weights[name]) for name in weights)
