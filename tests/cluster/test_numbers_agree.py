"""The same numbers whatever the number of processes, and whether there is a cluster at all."""

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, clipped_value_loss, group_relative, kl_k3

pytestmark = pytest.mark.ray


def grpo_loss(logprobs, batch):
    loss, metrics = clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)
    kl = batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"]))
    return loss + 1e-3 * kl, metrics | {"policy/kl_ref": kl}


def run(cluster, *, n=1, steps=3, size=7, token_budget=8192):
    """A short GRPO run: rewards, response tokens and final weights."""
    task, model = rk.tasks.reverse_digits(length=6), rk.models.tiny(pretrained="reverse_digits")
    rollout = cluster.spawn(rk.RolloutWorker, model, n=n)
    actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3, n=n, token_budget=token_budget)
    reference = cluster.spawn(rk.ReferenceWorker, model, n=n)
    resharder, rewards, tokens = rk.Resharder(source=actor, target=rollout), [], []
    for prompts in task.batches(size=size, steps=steps):
        batch = rollout.generate(prompts, n=5)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        batch["ref_logprobs"] = reference.compute_logprobs(batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)
        metrics = actor.update(batch, loss_fn=grpo_loss, minibatches=2)
        resharder.reshard()
        rewards.append(batch["rewards"])
        tokens.append(batch["response_ids"])
    weights = actor.weights()
    return rewards, tokens, weights[0] if isinstance(weights, list) else weights, metrics


def same_weights(one, other, *, tolerance):
    return max(float((one[name] - other[name]).abs().max()) for name in one) <= tolerance


@pytest.fixture(scope="module")
def local():
    return run(rk.launch(backend="local"))


@pytest.fixture(scope="module")
def on_ray(ray_cluster):
    return run(ray_cluster)


@pytest.fixture(scope="module")
def on_two(ray_cluster):
    return run(ray_cluster, n=2)


def test_ray_samples_what_one_process_samples(local, on_ray):
    assert all(torch.equal(a, b) for a, b in zip(local[1], on_ray[1], strict=True))


def test_the_run_has_something_to_learn_from(local):
    assert torch.cat(local[0]).sum() > 0
    assert local[3]["actor/grad_norm"] > 0


def test_ray_ends_with_the_weights_of_one_process(local, on_ray):
    assert same_weights(local[2], on_ray[2], tolerance=1e-6)


def test_two_workers_sample_what_one_samples(on_ray, on_two):
    assert all(torch.equal(a, b) for a, b in zip(on_ray[1], on_two[1], strict=True))


def test_two_workers_give_rewards_in_the_order_of_the_prompts(on_ray, on_two):
    assert all(torch.equal(a, b) for a, b in zip(on_ray[0], on_two[0], strict=True))


def test_two_workers_report_the_metrics_of_one(on_ray, on_two):
    one, two = on_ray[3], on_two[3]
    numbers = [name for name in one if not isinstance(one[name], str)]
    assert {name: two[name] for name in numbers} == pytest.approx(
        {name: one[name] for name in numbers}, abs=1e-4
    )


def test_small_microbatches_end_with_the_same_weights(local):
    small = run(rk.launch(backend="local"), token_budget=24)
    assert same_weights(local[2], small[2], tolerance=1e-5)


def frozen_batches(num):
    """Eleven responses of 1 to 8 random tokens each, with every column that a loss reads."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num):
        lengths = torch.randint(1, 9, (11,), generator=generator).tolist()
        yield rk.Batch.from_columns(
            {
                "group_ids": np.arange(11) // 3,
                "prompt_ids": [torch.randint(3, 20, (4,), generator=generator) for _ in lengths],
                "response_ids": [torch.randint(3, 20, (n,), generator=generator) for n in lengths],
                "response_mask": [torch.ones(n, dtype=torch.int8) for n in lengths],
                "old_logprobs": [-torch.rand(n, generator=generator) for n in lengths],
                "ref_logprobs": [-torch.rand(n, generator=generator) for n in lengths],
                "advantages": [torch.randn(n, generator=generator) for n in lengths],
                "returns": [torch.rand(n, generator=generator) for n in lengths],
            }
        )


def test_two_actors_on_frozen_batches_end_with_the_weights_of_one(ray_cluster):
    """Five steps on the same tokens: 2 data-parallel ranks over gloo against 1 process."""
    model = rk.models.tiny(pretrained="reverse_digits")
    one = rk.ActorWorker(model, lr=1e-3)
    two = ray_cluster.spawn(rk.ActorWorker, model, lr=1e-3, n=2, name="two_actors")
    for batch in frozen_batches(5):
        for actor in (one, two):
            actor.update(batch, loss_fn=grpo_loss, minibatches=2)
    assert all(same_weights(one.weights(), w, tolerance=1e-5) for w in two.weights())


@pytest.mark.slow
def test_learning_rate_zero_changes_nothing_on_two_ranks(ray_cluster):
    model = rk.models.tiny(pretrained="reverse_digits")
    actor = ray_cluster.spawn(rk.ActorWorker, model, lr=0.0, n=2, name="still")
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, name="still_rollout")
    task = rk.tasks.reverse_digits(length=4)
    for prompts in task.batches(size=2, steps=3):
        batch = rollout.generate(prompts, n=3)
        batch["old_logprobs"] = batch["ref_logprobs"] = actor.compute_logprobs(batch)
        batch["advantages"] = batch.expand(torch.randn(6))
        actor.update(batch, loss_fn=grpo_loss)
    for weights in actor.weights():
        assert all(torch.equal(weights[name], model.weights[name]) for name in weights)


def test_two_critics_on_frozen_batches_end_with_the_values_and_metrics_of_one(ray_cluster):
    model = rk.models.tiny(pretrained="reverse_digits")
    one = rk.CriticWorker(model, lr=1e-3)
    two = ray_cluster.spawn(rk.CriticWorker, model, lr=1e-3, n=2, name="two_critics")
    for batch in frozen_batches(5):
        found, metrics = [], []
        for critic in (one, two):
            batch["values"] = critic.compute_values(batch)
            found.append(batch["values"])
            metrics.append(critic.update(batch, loss_fn=clipped_value_loss, minibatches=2))
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
        assert metrics[0].pop("critic/loss_hash") == metrics[1].pop("critic/loss_hash")
        assert metrics[1] == pytest.approx(metrics[0], abs=1e-4)
    assert found[0].abs().max() > 0.1


@pytest.mark.parametrize(
    ("recipe", "config"),
    [
        (rk.recipes.ppo, rk.recipes.PPOConfig(size=8, steps=3, kl_coef=1e-2, eval_every=0)),
        (rk.recipes.dapo, rk.recipes.DAPOConfig(size=4, steps=3, eval_every=0)),
    ],
    ids=["ppo", "dapo"],
)
def test_a_recipe_on_ray_is_the_recipe_in_one_process(ray_cluster, recipe, config):
    model = rk.models.tiny(pretrained="reverse_digits")
    logs = [
        recipe(cluster, model, rk.tasks.reverse_digits(length=6), config).log
        for cluster in (rk.launch(backend="local"), ray_cluster)
    ]
    for one, other in zip(*(log.records for log in logs), strict=True):
        names = [n for n in one if not n.startswith(("time/", "throughput/"))]
        names = [n for n in names if not isinstance(one[n], str)]
        assert [other[n] for n in names] == pytest.approx([one[n] for n in names], abs=1e-4)
