"""Costs: cases by hand, bounds in order, more work never quicker."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import LENGTHS, shared_run, small_run

import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.sim import cost, specs

WEIGHTS = ModelSpec.qwen25_1_5b().num_parameters  # 1.544e9
PLAIN = sim.Costs(
    train_bytes_per_flop=0.0, decode_overhead_s=0.0, trainer_s_per_sequence=0.0, trainer_s=0.0,
    matmul_efficiency=1.0, memory_efficiency=1.0, link_efficiency=1.0, collective_s=0.0,
)  # fmt: skip
MODELS = [ModelSpec.qwen25_7b(), ModelSpec.qwen3_30b_a3b(), ModelSpec.deepseek_r1_671b()]
FEW = st.integers(1, 400)
MANY = st.floats(1e3, 1e7)


def test_decode_of_one_row_reads_all_weights_by_hand():
    """2 x 1.544e9 bytes at 3.35e12 bytes/s: 0.92 ms; the products, 3.1e9 / 989e12, hide in it."""
    step = cost.decode_step(small_run(costs=PLAIN), 1, 0.0)
    assert step.memory_s == pytest.approx(2 * WEIGHTS / 3.35e12)
    assert step.compute_s == pytest.approx(2 * WEIGHTS / 989e12)
    assert step.seconds == pytest.approx(step.memory_s)


def test_the_floor_of_decode_is_the_same_for_one_row_and_for_a_hundred():
    run = small_run(costs=PLAIN)
    assert cost.decode_step(run, 1, 0).seconds == cost.decode_step(run, 100, 0).seconds
    assert cost.decode_step(run, 1000, 0).seconds > cost.decode_step(run, 1, 0).seconds


def test_the_cache_is_read_at_each_step_by_hand():
    """28,672 bytes a token: 1e6 tokens take 8.6 ms at 3.35e12 bytes/s."""
    run = small_run(costs=PLAIN)
    more = cost.decode_step(run, 1, 1e6).seconds - cost.decode_step(run, 1, 0).seconds
    assert more == pytest.approx(28672e6 / 3.35e12)


def test_tensor_parallel_decode_by_hand():
    """Two all-reduces a layer of 2 x 1536 bytes a row: 2 (tp - 1) / tp of it over the link."""
    run = small_run(costs=PLAIN, generate=Layout(tp=4))
    step = cost.decode_step(run, 10, 0)
    assert step.network_s == pytest.approx(2 * 28 * 1.5 * 2 * 1536 * 10 / 450e9)
    assert step.memory_s == pytest.approx(2 * WEIGHTS / 4 / 3.35e12)


def test_update_without_recomputation_by_hand():
    """6 operations a weight and token over 4 trainers, no attention; bubble 1 / micro-batches."""
    run = small_run(costs=PLAIN, recompute=False, train=Layout(pp=1))
    tokens = 1e6
    seconds = cost.update(run, tokens, 0.0, 100).compute_s
    assert seconds == pytest.approx(6 * WEIGHTS * tokens / 4 / 989e12)
    two = replace(run, train=Layout(pp=2))
    micro = tokens / 2 / 32768
    assert cost.update(two, tokens, 0.0, 100).other_s == pytest.approx(seconds / micro)


def test_recomputation_is_a_third_more():
    kept, again = (
        cost.update(small_run(costs=PLAIN, recompute=recompute), 1e6, 1e9, 10).compute_s
        for recompute in (False, True)
    )
    assert again == pytest.approx(4 / 3 * kept)


def test_logprobs_are_a_third_of_the_update_and_double_with_a_reference():
    run = small_run(costs=PLAIN, recompute=False)
    one = cost.logprobs(run, 1e6, 1e9, 10)
    assert cost.update(run, 1e6, 1e9, 10).compute_s == pytest.approx(3 * one.compute_s)
    assert cost.logprobs(replace(run, forwards=2), 1e6, 1e9, 10).seconds == 2 * one.seconds


def test_a_mini_batch_takes_at_least_its_longest_sequence():
    """64 sequences over 128 ranks: the longest of them alone, on one rank or shared by cp."""
    run = small_run(num_devices=140, costs=PLAIN, recompute=False, train=Layout())
    longest = LENGTHS.longest(64) + 100
    assert 3000 < longest < 8292
    seconds = cost.update(run, 64 * 1100.0, 0.0, 64).compute_s
    assert seconds == pytest.approx(6 * WEIGHTS * longest / 989e12)
    shared = replace(run, train=Layout(cp=4))
    assert cost.update(shared, 64 * 1100.0, 0.0, 64).compute_s == pytest.approx(seconds / 4)


def test_context_parallel_trainers_exchange_keys_and_values_by_hand():
    """1,024 bytes a layer and token, of which each of 4 gets three quarters, in 4 passes."""
    run, tokens = small_run(costs=PLAIN, train=Layout()), 1e6
    alone, shared = (
        cost.update(replace(run, train=Layout(cp=cp)), tokens, 0.0, 1000) for cp in (1, 4)
    )
    assert alone.network_s == pytest.approx(3 * 2 * WEIGHTS * 0.75 / 450e9)  # gradients
    exchanged_s = 4 * 0.75 * tokens * 28 * 1024 / 450e9
    assert shared.network_s - alone.network_s == pytest.approx(exchanged_s)


def test_attention_grows_with_the_square():
    """Causal: 2 x 28 layers x 1536 x T^2 on top of 2 x weights x T."""
    model = ModelSpec.qwen25_1_5b()
    by_hand = 2 * WEIGHTS * 8192 + 2 * 28 * 1536 * 8192**2
    assert cost.forward_flops(model, 8192, 8192**2) == pytest.approx(by_hand)


def test_sharded_weights_are_gathered_for_each_micro_batch():
    whole, cut = (
        cost.update(small_run(costs=PLAIN, sharded=sharded, train=Layout()), 1e6, 0.0, 10)
        for sharded in (False, True)
    )
    assert cut.network_s > whole.network_s


def test_software_of_one_family_is_slower():
    costs = replace(PLAIN, slow_software=3.0)
    fast = cost.update(small_run(costs=costs), 1e6, 0.0, 10)
    assert fast.compute_s == cost.update(small_run(costs=PLAIN), 1e6, 0.0, 10).compute_s
    there = small_run(costs=costs, node=specs.NODE_A3)
    once = replace(there, costs=PLAIN)
    slow = cost.update(there, 1e6, 0.0, 10).compute_s
    assert slow == pytest.approx(3 * cost.update(once, 1e6, 0.0, 10).compute_s)


@given(FEW, MANY, st.sampled_from(MODELS), st.sampled_from(specs.NODES))
def test_the_estimate_lies_between_its_bounds(rows, tokens, model, node):
    run = shared_run(model=model, node=node, generate=Layout(tp=2, dp=2), train=Layout(tp=2, pp=2))
    for found in (
        cost.decode_step(run, rows, tokens),
        cost.prefill(run, tokens, tokens**1.5),
        cost.logprobs(run, tokens, tokens**1.5, rows),
        cost.update(run, tokens, tokens**1.5, rows),
        sim.central(run).cost,
        sim.distributed(run).cost,
        sim.naive(run).cost,
        sim.allgather_swap(run).cost,
        sim.broadcast(run).cost,
    ):
        assert found.lower_s <= found.seconds * (1 + 1e-9)
        assert found.seconds <= found.upper_s * (1 + 1e-9)


@given(FEW, MANY, st.floats(1.0, 10.0))
def test_more_tokens_are_never_quicker(rows, tokens, times):
    run, more = small_run(), tokens * times
    pairs = [
        (cost.update(run, each, each, rows).seconds for each in (tokens, more)),
        (cost.logprobs(run, each, each, rows).seconds for each in (tokens, more)),
        (cost.decode_step(run, rows, each).seconds for each in (tokens, more)),
        (cost.decode_step(run, each, 0).seconds for each in (rows, rows + 1)),
    ]
    for fewer_s, more_s in pairs:
        assert more_s >= fewer_s * (1 - 1e-12)


@given(FEW, MANY, st.floats(1.0, 10.0))
def test_a_faster_device_is_never_slower(rows, tokens, times):
    device = specs.H100
    fast = replace(specs.NODE_H100, device=replace(device, flops=times * device.flops))
    for stage in (cost.update, cost.logprobs):
        quick = stage(small_run(node=fast), tokens, tokens, rows).seconds
        assert quick <= stage(small_run(), tokens, tokens, rows).seconds
