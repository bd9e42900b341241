"""Moves of samples and weights: bytes by hand, who keeps what where."""

from dataclasses import replace

import pytest
from small_runs import WORKLOAD, shared_run, small_run

import rlkit as rk
import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.dock import GRPO, predicted_traffic
from rlkit.sim import moves, specs


def test_bytes_through_the_dock_are_those_that_the_dock_predicts():
    """Two nodes, one store: every byte goes in or out of it."""
    run, work = small_run(), WORKLOAD
    found = predicted_traffic(GRPO, 32, 4, 100, 1000, nodes=("a", "b"), central=True)
    busiest, away = moves.dock_bytes(work, 2, central=True)
    assert busiest == pytest.approx(found["bytes"].sum())
    assert away == pytest.approx(found.query("source != target")["bytes"].sum())
    assert sim.central(run).cost.network_s == pytest.approx(busiest / 50e6)


def test_warehouses_share_the_work_and_the_central_store_does_not():
    small, large = (shared_run(num_devices=n, train=Layout()) for n in (16, 128))
    assert sim.distributed(large).cost.network_s < 0.5 * sim.distributed(small).cost.network_s
    assert sim.central(large).cost.network_s == pytest.approx(sim.central(small).cost.network_s)


def test_bytes_of_a_reshard_are_those_of_its_plan():
    """Each of 16 trainers of tp 2 x pp 2 becomes an engine: three quarters come from others."""
    run = shared_run(model=ModelSpec.qwen25_7b(), train=Layout(tp=2, pp=2))
    plan = rk.plan_reshard(run.model, run.train, run.generate, devices=16)
    for move in (sim.naive, sim.allgather_swap):
        assert move(run).num_bytes == pytest.approx(plan.nbytes)
    assert plan.nbytes == pytest.approx(16 * 0.75 * 2 * run.counts.parameters, rel=0.02)


def test_shards_of_qwen25_32b_by_hand():
    """65.5 GB: 4.1 GB a trainer of tp 4 x pp 4, 32.8 GB an engine of tp 2."""
    run = shared_run(
        model=ModelSpec.qwen25_32b(), node=specs.NODE_A3,
        train=Layout(tp=4, pp=4), generate=Layout(tp=2),
    )  # fmt: skip
    assert moves.train_shard_bytes(run) == pytest.approx(4.10e9, rel=0.15)
    assert moves.engine_shard_bytes(run) == pytest.approx(32.8e9, rel=0.01)
    assert sim.naive(run).kept_bytes == pytest.approx(4.10e9, rel=0.15)
    swapped = sim.allgather_swap(run)
    assert swapped.kept_bytes == 0
    assert swapped.host_bytes == sim.naive(run).kept_bytes
    assert swapped.cost.seconds > sim.naive(run).cost.seconds


def test_experts_are_cut_over_all_devices_of_an_engine():
    run = shared_run(model=ModelSpec.qwen3_30b_a3b(), generate=Layout(ep=8))
    by_hand = run.counts.dense_bytes + 2 * run.counts.expert_parameters / 8
    assert moves.engine_shard_bytes(run) == pytest.approx(by_hand, rel=1e-3)


def test_fully_sharded_weights_are_spread_over_all_trainers():
    run = shared_run(sharded=True, train=Layout())
    assert moves.train_shard_bytes(run) == pytest.approx(2 * 1.544e9 / 16, rel=1e-3)


def test_larger_batches_move_more():
    once, twice = (
        moves.dock_bytes(replace(WORKLOAD, prompts=n), 2, central=False) for n in (32, 64)
    )
    assert twice == pytest.approx(tuple(2 * size for size in once))


def test_storage_takes_its_latency_and_its_bytes():
    assert sim.through_storage(small_run()).cost.seconds == pytest.approx(
        2 + 2 * 1.544e9 / 2e9, rel=1e-3
    )
