"""An actor cut over two workers on Ray: the numbers of one process, and everything around them."""

import functools
import time

import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss

pytestmark = [pytest.mark.ray, pytest.mark.megatron]


def make_model():
    spec = rk.ModelSpec(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=128,
    )  # fmt: skip
    return rk.models.tiny(spec=spec)


def make_batch():
    """Eleven responses of 1 to 8 tokens, of four prompts."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (11,), generator=generator).tolist()
    return rk.Batch.from_columns(
        {
            "group_ids": torch.arange(11) // 3,
            "prompt_ids": [torch.randint(3, 20, (4,), generator=generator) for _ in lengths],
            "response_ids": [torch.randint(3, 20, (n,), generator=generator) for n in lengths],
            "response_mask": [torch.ones(n, dtype=torch.int8) for n in lengths],
            "old_logprobs": [-3 - torch.rand(n, generator=generator) for n in lengths],
            "advantages": [torch.randn(n, generator=generator) for n in lengths],
        }
    )


def loss_fn(logprobs, batch):
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


TORCH = functools.partial(rk.TorchBackend, options=rk.TorchOptions(sequence_parallel=True))


CUTS = {
    "megatron": (rk.MegatronBackend, rk.Layout(tp=2)),
    "megatron, context": (rk.MegatronBackend, rk.Layout(cp=2)),
    "torch": (TORCH, rk.Layout(tp=2)),
}


@pytest.fixture(scope="module", params=CUTS)
def actor(ray_cluster, request):
    backend, layout = CUTS[request.param]
    actor = ray_cluster.spawn(rk.ActorWorker, make_model(), backend=backend, layout=layout, lr=1e-3)
    assert len(actor) == 2
    return actor


def numbers(metrics):
    return {name: value for name, value in metrics.items() if not isinstance(value, str)}


def test_two_ranks_train_as_one_process_and_hand_their_weights_on(
    ray_cluster, actor, tmp_path, request
):
    batch, one = make_batch(), rk.ActorWorker(make_model(), lr=1e-3)
    for _ in range(2):
        expected = one.compute_logprobs(batch).load(batch.uids).padded()
        batch["now"] = actor.compute_logprobs(batch)
        torch.testing.assert_close(batch["now"], expected, atol=1e-5, rtol=1e-4)
        metrics = [each.update(batch, loss_fn=loss_fn, minibatches=2) for each in (one, actor)]
        assert numbers(metrics[1]) == pytest.approx(numbers(metrics[0]), abs=1e-4)
    # AdamW makes a step of 1e-3 of a gradient near 0, whatever of it is rounding.
    atol = 1e-4 if "context" in request.node.callspec.params["actor"] else 1e-5
    for weights in actor.weights():
        for name, weight in one.weights().items():
            torch.testing.assert_close(weights[name], weight, atol=atol, rtol=1e-4)
    rollout = ray_cluster.spawn(rk.RolloutWorker, make_model(), name="served")
    report = rk.Resharder(source=actor, target=rollout).reshard()
    assert (report.version, report.verified) == (2, True)
    saved = rk.models.load(actor.save_pretrained(tmp_path / "policy"))
    assert all(torch.equal(saved.weights[name], w) for name, w in actor.weights()[0].items())


def test_a_loss_that_fails_keeps_its_type_and_the_actor_goes_on(actor):
    def fails(logprobs, batch):
        raise ArithmeticError("by design")

    batch, version = make_batch(), actor.version
    with pytest.raises(ArithmeticError, match="by design"):
        actor.update(batch, loss_fn=fails)
    assert actor.update(batch, loss_fn=loss_fn)["actor/version"] == version + 1


def test_an_interrupted_update_stops_and_the_actor_goes_on(actor):
    def slow(logprobs, batch):
        time.sleep(0.2)
        return loss_fn(logprobs, batch)

    batch, version = make_batch(), actor.version
    running = actor.submit.update(batch, loss_fn=slow, epochs=1000)
    time.sleep(3)
    running.cancel()
    with pytest.raises(RuntimeError, match="interrupted"):
        running.result(timeout_s=60)
    assert actor.update(batch, loss_fn=loss_fn)["actor/version"] == version + 1


@pytest.mark.slow
def test_a_rank_that_fails_before_its_peers_leaves_none_waiting(ray_cluster):
    layout = rk.Layout(dp=2)
    group = ray_cluster.spawn(
        rk.ActorWorker, make_model(), backend=rk.MegatronBackend, layout=layout, name="pair"
    )
    batch = make_batch()
    advantages = batch["advantages"]
    advantages[3, 0] = float("nan")  # a row of one of the two ranks
    batch["advantages"] = advantages
    with pytest.raises(ValueError, match="advantages: got nan in the row of uid 3"):
        group.submit.update(batch, loss_fn=loss_fn).result(timeout_s=60)
    assert group.update(make_batch(), loss_fn=loss_fn)["actor/version"] == 1


@pytest.mark.slow
def test_a_worker_that_cuts_nothing_refuses_a_layout(ray_cluster):
    for worker, layout, need in (
        (rk.RolloutWorker, rk.Layout(tp=2), "got layout TP2, need one that leaves the model"),
        (rk.ActorWorker, rk.Layout(pp=2), "got layout PP2, need pp=1 and ep=1"),
    ):
        with pytest.raises(ValueError, match=need):
            ray_cluster.spawn(worker, make_model(), layout=layout)
