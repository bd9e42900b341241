"""Schedules of one step after another: streamed trains as synchronous does."""

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative
from rlkit.schedule import streamed, synchronous
from rlkit.schedule.in_turn import in_order


class Loop:
    """A small GRPO loop in the five parts of a schedule."""

    def __init__(self, cluster):
        model = rk.models.tiny(pretrained="reverse_digits")
        self.task = rk.tasks.reverse_digits(seed=3)
        self.rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=8, max_rows=8)
        self.actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3)
        self.resharder = rk.Resharder(source=self.actor, target=self.rollout)
        self.events = []

    def prompts(self, steps, size=6):
        stream = self.task.stream(size=size)
        return [next(stream) for _ in range(steps)]

    def generate(self, prompts):
        self.events.append("generate")
        return self.rollout.generate(prompts, n=4)

    def stream(self, prompts):
        for chunk in self.rollout.stream(prompts, n=4):
            self.events.append("chunk")
            yield chunk

    def prepare(self, batch):
        self.events.append("prepare")
        batch["rewards"] = rk.score(self.task.verify, batch)
        batch["old_logprobs"] = self.actor.compute_logprobs(batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)

    def train(self, batch):
        self.events.append("train")
        return self.actor.update(batch, loss_fn=loss, minibatches=2)

    def sync(self):
        self.resharder.reshard()

    def weights(self):
        return self.actor.weights()


def loss(logprobs, batch):
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


def run(schedule, rollout_step, loop, steps=3):
    found = schedule(loop.prompts(steps), rollout_step, loop.prepare, loop.train, loop.sync)
    return list(found)


def test_streamed_trains_what_synchronous_trains():
    with rk.launch(backend="local") as cluster:
        first, second = Loop(cluster), Loop(cluster)
        before = {name: value.clone() for name, value in first.weights().items()}
        records = run(synchronous, first.generate, first)
        others = run(streamed, second.stream, second)
        for record, other in zip(records, others, strict=True):
            assert record["step"] == other["step"]
            assert np.array_equal(record["batch"].meta["uid"], other["batch"].meta["uid"])
            for name in ("response_ids", "rewards", "rollout_logprobs"):
                assert torch.equal(record["batch"][name], other["batch"][name])
        found, same = first.weights(), second.weights()
        assert any(not torch.equal(found[name], before[name]) for name in found)
        for name, value in found.items():
            torch.testing.assert_close(same[name], value, rtol=0, atol=1e-6)


def test_complete_groups_are_prepared_before_the_last_is_generated():
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        run(streamed, loop.stream, loop, steps=1)
    assert loop.events.count("chunk") == loop.events.count("prepare") > 1
    assert loop.events[:2] == ["chunk", "prepare"]
    assert loop.events[-1] == "train"


def test_a_chunk_has_whole_groups_and_at_least_so_many():
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        (prompts,) = loop.prompts(1, size=7)
        chunks = list(loop.rollout.stream(prompts, n=3, least=4))
        sizes = [len(set(chunk.meta["group_ids"].tolist())) for chunk in chunks]
        assert sum(sizes) == 7
        assert all(size >= 4 for size in sizes[:-1])
        for chunk in chunks:
            _, counts = np.unique(chunk.meta["group_ids"], return_counts=True)
            assert (counts == 3).all()


def test_a_stream_that_is_given_up_leaves_the_worker_usable():
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        (prompts,) = loop.prompts(1)
        stream = loop.rollout.stream(prompts, n=4)
        next(stream)
        stream.close()
        assert len(loop.rollout.generate(prompts, n=4)) == 24


def test_another_generation_beside_a_stream_takes_nothing_from_it():
    with rk.launch(backend="local") as cluster:
        loop, other = Loop(cluster), Loop(cluster)
        (prompts,) = loop.prompts(1)
        stream = loop.rollout.stream(prompts, n=4)
        chunks = [next(stream)]
        assert len(loop.rollout.generate(other.prompts(2)[1], n=4)) == 24
        chunks += list(stream)
        whole = other.rollout.generate(other.prompts(1)[0], n=4)
        assert torch.equal(in_order(chunks, prompts)["response_ids"], whole["response_ids"])


def test_streamed_says_which_groups_are_missing():
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        (prompts,) = loop.prompts(1)
        chunks = list(loop.rollout.stream(prompts, n=4))
        with pytest.raises(ValueError, match=r"streamed: got nothing for 6 prompts"):
            in_order([], prompts)
        with pytest.raises(ValueError, match=r"got \d groups, need those of the 6 prompts"):
            in_order(chunks[:1], prompts)


@pytest.mark.parametrize("least", [0, 1.5, True])
def test_a_wrong_least_is_an_error(least):
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        (prompts,) = loop.prompts(1)
        with pytest.raises((TypeError, ValueError), match="least: got"):
            next(loop.rollout.stream(prompts, n=4, least=least))
