"""Moves of samples and weights: bytes by hand, who keeps what where."""

from dataclasses import replace

import pytest
from small_runs import WORKLOAD, shared_run, small_run

import rlkit.sim as sim
from rlkit.config import Layout
from rlkit.sim import moves, specs


def test_bytes_through_the_dock_are_those_of_the_published_tables_sizes():
    """384 x 32 sequences of 1024 + 2048 tokens: 4 x 12,288 x (7 x 1024 + 20 x 2048) = 2.366e9."""
    lengths = sim.Lengths(mean_tokens=2047.99, sigma=0.5, limit_tokens=2048)
    work = sim.Workload(prompts=384, samples=32, prompt_tokens=1024, lengths=lengths)
    assert moves.dock_bytes(small_run(workload=work)) == pytest.approx(2.366e9, rel=1e-3)


def test_a_central_store_takes_as_long_as_its_bytes():
    run = small_run()
    found = sim.central(run)
    assert found.cost.network_s == pytest.approx(moves.dock_bytes(run) / 50e6)


def test_warehouses_share_the_work_and_the_central_store_does_not():
    small, large = (shared_run(num_devices=n, train=Layout()) for n in (16, 128))
    assert sim.distributed(large).cost.network_s < sim.distributed(small).cost.network_s
    assert sim.central(large).cost.network_s == sim.central(small).cost.network_s


def test_shards_of_qwen25_32b_by_hand():
    """65.5 GB: 4.1 GB a trainer of tp 4 x pp 4, 32.8 GB an engine of tp 2."""
    run = shared_run(
        model=specs.QWEN25_32B, node=specs.NODE_A3, train=Layout(tp=4, pp=4), generate=Layout(tp=2)
    )
    assert moves.train_shard_bytes(run) == pytest.approx(4.10e9, rel=0.01)
    assert moves.engine_shard_bytes(run) == pytest.approx(32.8e9, rel=0.01)
    assert sim.naive(run).kept_bytes == pytest.approx(4.10e9, rel=0.01)
    swapped = sim.allgather_swap(run)
    assert swapped.kept_bytes == 0
    assert swapped.host_bytes == sim.naive(run).kept_bytes
    assert swapped.cost.seconds > sim.naive(run).cost.seconds


def test_experts_are_cut_over_all_devices_of_an_engine():
    model = specs.QWEN3_30B_A3B
    run = shared_run(model=model, generate=Layout(tp=1, dp=8))
    experts = 2 * model.expert_parameters
    assert moves.engine_shard_bytes(run) == pytest.approx(model.dense_bytes + experts / 8)


def test_fully_sharded_weights_are_spread_over_all_trainers():
    run = shared_run(sharded=True, train=Layout())
    assert moves.train_shard_bytes(run) == pytest.approx(2 * 1.544e9 / 16)


def test_larger_batches_move_more():
    run = small_run()
    twice = replace(run, workload=replace(WORKLOAD, prompts=64))
    assert moves.dock_bytes(twice) == 2 * moves.dock_bytes(run)


def test_storage_takes_its_latency_and_its_bytes():
    assert sim.through_storage(small_run()).cost.seconds == pytest.approx(2 + 2 * 1.544e9 / 2e9)
