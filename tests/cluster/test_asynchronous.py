"""Asynchronous training on Ray: generation and training in processes of their own, side by side."""

import time

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative
from rlkit.schedule import StalenessRule, asynchronous

pytestmark = pytest.mark.ray

STEPS, SIZE, N = 6, 4, 4


def loss(logprobs, batch):
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


@pytest.fixture(scope="module")
def run(ray_cluster):
    """Records of a run whose train steps are slow, its trace, and seconds between records."""
    model = rk.models.tiny(pretrained="reverse_digits")
    task = rk.tasks.reverse_digits(seed=3)
    rollout = ray_cluster.spawn(
        rk.RolloutWorker, model, n=2, max_new_tokens=40, max_rows=8, name="async_rollout"
    )
    actor = ray_cluster.spawn(rk.ActorWorker, model, lr=1e-3, name="async_actor")
    resharder = rk.Resharder(source=actor, target=rollout)
    resharder.reshard()
    feed = rk.RolloutFeed(rollout, n=N, temperature=1.5, seconds=0.05)

    def prepare(batch):
        batch["rewards"] = rk.score(task.verify, batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)

    def train(batch):
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        return actor.update(batch, loss_fn=loss)

    stream = task.stream(size=SIZE)
    prompts = [next(stream) for _ in range(STEPS)]
    rule = StalenessRule(groups_per_step=SIZE, max_staleness=2)
    start = time.time()
    records = list(asynchronous(prompts, feed, prepare, train, resharder.reshard, rule=rule))
    print(f"{len(records)} steps in {time.time() - start:.1f} s")
    return records, rk.trace.frame()


def test_every_group_is_trained_once(run):
    groups = np.concatenate([record["batch"].meta["group_ids"] for record in run[0]])
    found, counts = np.unique(groups, return_counts=True)
    assert len(run[0]) == STEPS
    assert len(found) == STEPS * SIZE
    assert (counts == N).all()


def test_versions_never_fall_within_a_response_and_stay_behind_the_trainer(run):
    for record in run[0]:
        batch = record["batch"]
        versions, mask = batch["token_version"], batch["response_mask"].bool()
        assert (versions[mask] <= record["step"]).all()
        later = versions[:, 1:] >= versions[:, :-1]
        assert (later | ~mask[:, 1:]).all()


def test_both_engines_had_work(run):
    _, frame = run
    busy = frame[frame["stage"] == "generate"].groupby("worker")["tokens"].sum()
    assert (busy[["async_rollout/0", "async_rollout/1"]] > 0).all()


def test_logprobs_of_half_old_responses_are_those_of_their_versions(run):
    """On-policy tokens have the trainer's logprobs; all are finite."""
    for record in run[0][:1]:
        batch = record["batch"]
        mask = batch["response_mask"].bool()
        difference = (batch["rollout_logprobs"] - batch["old_logprobs"])[mask]
        assert torch.isfinite(difference).all()
        assert difference.abs().max() < 1e-3
