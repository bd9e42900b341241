"""Weights move whole, verified, and are published by all targets or by none."""

import os
import signal
from dataclasses import replace

import pytest
import torch

import rlkit as rk
from rlkit.reshard import Held, allgather_swap, direct, naive, separate, shard
from rlkit.reshard.fingerprints import fingerprint, fingerprint_rows


def pair(cluster, rollout_class=rk.RolloutWorker, n=1, **options):
    """An actor with other weights than the rollout workers, and the resharder between them."""
    spec = rk.models.tiny_spec()
    actor = cluster.spawn(rk.ActorWorker, rk.models.tiny(spec=spec, seed=1), **options)
    rollout = cluster.spawn(rollout_class, rk.models.tiny(spec=spec, seed=2), n=n, **options)
    return actor, rollout, rk.Resharder(source=actor, target=rollout)


class LosesTheLastTensor(rk.RolloutWorker):
    """Fails on one rank after the weights arrived."""

    def receive_weights(self, *, version, link):
        super().receive_weights(version=version, link=link)
        if self.context.dp_rank == 1:
            self.staged = None
            raise ConnectionError("cable pulled")


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_weights_arrive_bit_equal_locally():
    actor, rollout, resharder = pair(rk.launch(backend="local"))
    assert not equal(actor.weights(), rollout.weights())
    report = resharder.reshard()
    assert equal(actor.weights(), rollout.weights())
    assert report.verified


def test_later_training_does_not_reach_into_the_engine():
    actor, rollout, resharder = pair(rk.launch(backend="local"))
    resharder.reshard()
    before = {name: t.clone() for name, t in rollout.weights().items()}
    with torch.no_grad():
        next(iter(actor.weights().values())).add_(1)
    assert equal(before, rollout.weights())


def test_the_target_takes_the_sources_version():
    actor, rollout, resharder = pair(rk.launch(backend="local"))
    actor._transport.worker._version = 7
    assert resharder.reshard().version == 7 == rollout.version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8])
def test_changing_any_one_element_changes_the_fingerprint(dtype):
    tensor = torch.arange(50).to(dtype)
    for i in range(50):
        other = tensor.clone()
        other[i] += 1
        assert fingerprint(other) != fingerprint(tensor)


@pytest.mark.parametrize("size", [1, 32, 960, 1536, 2048])
def test_rows_of_a_large_tensor_that_change_places_change_the_fingerprint(size):
    tensor = torch.randn(2**18 // size, size)
    for first, last in ((0, 1), (1, 5), (3, len(tensor) - 1), (0, len(tensor) // 2)):
        other = tensor.clone()
        other[[first, last]] = tensor[[last, first]]
        assert fingerprint(other) != fingerprint(tensor)
    assert fingerprint(tensor.roll(1, 0)) != fingerprint(tensor)


def test_swapping_two_elements_changes_the_fingerprint():
    assert fingerprint(torch.tensor([1.0, 2.0])) != fingerprint(torch.tensor([2.0, 1.0]))


@pytest.mark.parametrize("length", [1, 8032, 20_000])
def test_fingerprints_of_rows_are_those_of_each_row(length):
    rows = torch.randint(-(2**62), 2**62, (3, length))
    assert fingerprint_rows(rows).tolist() == [fingerprint(row) for row in rows]


def test_another_model_at_the_target_is_an_error_that_names_the_parameter():
    cluster = rk.launch(backend="local")
    small = rk.models.tiny()
    actor = cluster.spawn(rk.ActorWorker, small)
    wide = rk.ModelSpec(
        vocab_size=23, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=1,
        num_kv_heads=1, head_dim=32,
    )  # fmt: skip
    rollout = cluster.spawn(rk.RolloutWorker, rk.models.tiny(spec=wide))
    with pytest.raises(ValueError, match=r"lm_head.weight is .*need the same model"):
        rk.Resharder(source=actor, target=rollout).reshard()


def test_groups_the_wrong_way_round_are_an_error():
    actor, rollout, _ = pair(rk.launch(backend="local"))
    with pytest.raises(TypeError, match="actors as the source"):
        rk.Resharder(source=rollout, target=actor)
    with pytest.raises(TypeError, match="strategy: got 'naive', need a function"):
        rk.Resharder(source=actor, target=rollout, strategy="naive")


@pytest.mark.ray
def test_weights_arrive_bit_equal_on_two_engines(ray_cluster):
    actor, rollout, resharder = pair(ray_cluster, n=1, name=None)
    report = resharder.reshard()
    assert equal(actor.weights(), rollout.weights())
    assert report.bytes == sum(t.numel() * 4 for t in actor.weights().values())


@pytest.mark.ray
def test_an_error_on_one_engine_publishes_on_none_and_the_next_try_works(ray_cluster):
    actor, rollout, resharder = pair(ray_cluster, LosesTheLastTensor, n=2)
    before = rollout.weights()
    with pytest.raises(ConnectionError, match="cable pulled"):
        resharder.reshard()
    assert all(equal(a, b) for a, b in zip(before, rollout.weights(), strict=True))
    good = ray_cluster.spawn(rk.RolloutWorker, rk.models.tiny(seed=2), n=2)
    assert rk.Resharder(source=actor, target=good).reshard().verified
    assert all(equal(actor.weights(), weights) for weights in good.weights())


def test_an_older_version_is_taken_and_said(caplog):
    actor, rollout, resharder = pair(rk.launch(backend="local"))
    actor._transport.worker._version = 7
    resharder.reshard()
    actor._transport.worker._version = 3
    assert resharder.reshard().version == 3 == rollout.version
    assert "version 3 is older than version 7" in caplog.text


class FailsBeforeItReceives(rk.RolloutWorker):
    """Leaves the sender alone in its broadcast."""

    def receive_weights(self, *, version, link):
        raise ConnectionError("no cable")


@pytest.mark.ray
@pytest.mark.slow
def test_a_sender_is_not_left_waiting_for_a_target_that_failed(ray_cluster):
    spec = rk.models.tiny_spec()
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(spec=spec, seed=1))
    bad = ray_cluster.spawn(FailsBeforeItReceives, rk.models.tiny(spec=spec))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="no cable"):
            rk.Resharder(source=actor, target=bad).reshard()
    assert actor.version == 0  # answers: it is not in a broadcast any more


@pytest.mark.ray
@pytest.mark.slow
def test_a_dead_target_is_named_before_anything_moves(ray_cluster):
    actor, rollout, resharder = pair(ray_cluster)
    resharder.reshard()
    os.kill(rollout.processes[0][1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"rollout.*died"):
            resharder.reshard()
    assert actor.version == 0
    ray_cluster.respawn(rollout)
    assert resharder.reshard().verified


@pytest.mark.ray
@pytest.mark.slow
def test_a_respawned_engine_is_connected_again(ray_cluster):
    actor, rollout, resharder = pair(ray_cluster)
    resharder.reshard()
    ray_cluster.respawn(rollout)
    assert not equal(actor.weights(), rollout.weights())
    resharder.reshard()
    assert equal(actor.weights(), rollout.weights())


class HalfAnActor(rk.ActorWorker):
    """Says that it holds half of each matrix, and hands out that half."""

    def held(self):
        return Held(model=self.spec, layout=rk.Layout(tp=2), form=separate, dtype="float32")

    def shard(self):
        halves = shard(self.spec, rk.Layout(tp=2), separate, self.weights())
        return halves[self.context.dp_rank]


@pytest.mark.ray
@pytest.mark.parametrize("strategy", [direct, naive])
def test_two_halves_make_an_engine_whole(ray_cluster, strategy):
    spec = replace(rk.models.tiny_spec(), num_heads=4, num_kv_heads=4)
    actor = ray_cluster.spawn(HalfAnActor, rk.models.tiny(spec=spec, seed=1), n=2)
    rollout = ray_cluster.spawn(rk.RolloutWorker, rk.models.tiny(spec=spec, seed=2))
    resharder = rk.Resharder(source=actor, target=rollout, strategy=strategy)
    report = resharder.reshard()
    assert equal(actor.weights()[0], rollout.weights())
    assert set(resharder.plan().moves.source.tolist()) == {0, 1}
    assert report.bytes == resharder.plan().nbytes
    before = rollout.weights()
    ray_cluster.respawn(actor)
    assert resharder.reshard().verified
    assert equal(before, rollout.weights())


@pytest.mark.ray
def test_a_swap_needs_groups_that_share_devices(ray_cluster):
    actor, rollout, _ = pair(ray_cluster)
    apart = rk.Resharder(source=actor, target=rollout, strategy=allgather_swap)
    with pytest.raises(ValueError, match="layouts on disjoint devices"):
        apart.reshard()
    beside = ray_cluster.spawn(rk.RolloutWorker, rk.models.tiny(seed=2), colocate_with=actor)
    assert rk.Resharder(source=actor, target=beside, strategy=allgather_swap).reshard().verified
    assert equal(actor.weights(), beside.weights())


def test_after_a_swap_the_actor_is_in_host_memory_until_it_is_called():
    actor, rollout, _ = pair(rk.launch(backend="local"))
    before = {name: t.clone() for name, t in actor.weights().items()}
    held = actor.memory()
    resharder = rk.Resharder(source=actor, target=rollout, strategy=allgather_swap)
    resharder.reshard()
    assert equal(before, rollout.weights())
    assert actor.memory() == {"weights": 0, "gradients": 0, "optimizer": 0,
                              "host_swap": actor.memory()["host_swap"]}  # fmt: skip
    assert actor.memory()["host_swap"] >= held["weights"]
    assert equal(before, actor.weights())
    assert actor.memory() == held


def test_the_report_counts_what_moved_and_what_a_target_held():
    _, rollout, resharder = pair(rk.launch(backend="local"))
    report, size = resharder.reshard(), rollout.memory()["weights"]
    assert report.bytes == resharder.plan().totals()["copy"] == size  # on one device
    assert 2 * size <= report.peak_gib * 2**30 <= 5 * size
