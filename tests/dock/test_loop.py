"""A GRPO step through the dock, stage by stage, in one process: stop anywhere, change, go on."""

from functools import partial

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative, kl_k3
from rlkit.dock import GRPO, LocalTransport, TransferDock, samplers

GROUPS, N = 3, 4
ROWS = GROUPS * N
GROUP = partial(samplers.whole_groups, group_size=N)
READS = {stage.name: stage.reads for stage in GRPO.stages}
READS["score"] = ("prompt", "response", "answer")


def loss(logprobs, batch):
    total, metrics = clipped_policy_loss(logprobs, batch)
    return total + 0.1 * batch.token_mean(kl_k3(logprobs, batch["ref_logprobs"])), metrics


class Loop:
    """One step of GRPO; ``verify`` scores."""

    def __init__(self, cluster, verify=None):
        model = rk.models.tiny(pretrained="reverse_digits")
        self.task = rk.tasks.reverse_digits(seed=3)
        self.verify = verify or self.task.verify
        self.rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=8)
        self.actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3)
        self.reference = cluster.spawn(rk.ReferenceWorker, model)
        self.dock = TransferDock(LocalTransport(graph=GRPO), timeout_s=0)
        self.stages = {n: partial(self.run_stage, n) for n in GRPO.consumers}
        own = {"driver": self.put_prompts, "rollout": self.generate, "train": self.train}
        self.stages |= own

    def put_prompts(self):
        prompts = next(self.task.batches(size=GROUPS, steps=1))
        groups = prompts.meta["group_ids"]
        self.uids = ((groups[:, None] << 16) + np.arange(N)).reshape(-1)
        columns = {"prompt_ids": prompts["prompt_ids"].repeat_interleave(N, 0)}
        columns |= {c: np.repeat(prompts[c], N).tolist() for c in ("prompt", "answer")}
        self.dock.put(columns, self.uids, group_ids=groups.repeat(N))

    def generate(self):
        lease = self.dock.get("rollout", ("prompt_ids", "prompt", "answer"), ROWS, GROUP)
        made = self.rollout.generate(lease.batch.select(range(0, ROWS, N)), n=N)
        written = {n: made.columns[n] for n in made.columns if n not in lease.batch.columns}
        self.dock.put(written, made.uids, stage="rollout", policy_version=made["policy_version"])
        self.dock.ack(lease)

    def run_stage(self, name):
        lease = self.dock.get(name, READS[name], ROWS, GROUP)
        column, values = {
            "score": lambda b: ("rewards", rk.score(self.verify, b)),
            "old": lambda b: ("old_logprobs", self.actor.compute_logprobs(b)),
            "reference": lambda b: ("ref_logprobs", self.reference.compute_logprobs(b)),
            "advantages": lambda b: (
                "advantages", group_relative(b["rewards"], b["group_ids"]),
            ),
        }[name](lease.batch)  # fmt: skip
        self.dock.put({column: values}, lease.uids, stage=name)
        self.dock.ack(lease)

    def train(self):
        lease = self.dock.get("train", READS["train"], ROWS, GROUP)
        batch = lease.batch
        batch["advantages"] = batch.expand(batch["advantages"])
        self.metrics = self.actor.update(batch, loss_fn=loss, minibatches=2)
        self.dock.ack(lease)

    def run(self, stages=tuple(stage.name for stage in GRPO.stages)):
        for name in stages:
            self.stages[name]()
        return self

    def weights(self):
        return {name: value.clone() for name, value in self.actor.weights().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


ALL = [stage.name for stage in GRPO.stages]


@pytest.fixture
def cluster():
    with rk.launch(backend="local") as cluster:
        yield cluster


def test_a_step_through_the_dock_is_the_step_of_the_notebooks_loop(cluster):
    loop = Loop(cluster).run()
    assert len(loop.dock.frame()) == 0  # every stage is done with every row
    other = Loop(cluster)
    batch = other.rollout.generate(next(other.task.batches(size=GROUPS, steps=1)), n=N)
    batch["rewards"] = rk.score(other.task.verify, batch)
    batch["old_logprobs"] = other.actor.compute_logprobs(batch)
    batch["ref_logprobs"] = other.reference.compute_logprobs(batch)
    batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
    metrics = other.actor.update(batch, loss_fn=loss, minibatches=2)
    assert loop.metrics["policy/loss"] == metrics["policy/loss"]
    assert same(loop.weights(), other.weights())


@pytest.mark.parametrize("stop", ["score", "old", "reference"])
def test_a_reward_overwritten_between_two_stages_is_what_the_update_learns_from(cluster, stop):
    at = ALL.index(stop) + 1
    loop = Loop(cluster).run(ALL[:at])
    fetched = loop.dock.fetch(loop.uids, ["rewards", "response"])
    responses = fetched["response"]
    changed = next(i for i, text in enumerate(responses) if responses.count(text) == 1)
    loop.dock.put({"rewards": torch.tensor([5.0])}, [loop.uids[changed]])
    loop.run(ALL[at:])
    plain, response = Loop(cluster).run(), responses[changed]
    verify = loop.task.verify
    told = Loop(cluster, lambda p, r, a: 5.0 if r == response else verify(p, r, a)).run()
    assert same(loop.weights(), told.weights())
    assert not same(loop.weights(), plain.weights())


@pytest.mark.parametrize("stop", ALL[:-1])
def test_after_any_stage_the_dock_shows_what_is_there_and_the_rest_goes_on(cluster, stop):
    at = ALL.index(stop) + 1
    loop = Loop(cluster).run(ALL[:at])
    frame, graph = loop.dock.frame(), {stage.name: stage for stage in GRPO.stages}
    for name in ALL:
        done = name in ALL[:at]
        for column in graph[name].writes:
            assert (column in frame and (frame[column] != "empty").all()) == done
        if name != "driver":
            assert (frame[f"stage:{name}"] == ("consumed" if done else "waiting")).all()
    loop.run(ALL[at:])
    assert loop.metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("skipped", "stops_at", "column"),
    [
        ("driver", "rollout", "prompt_ids"),
        ("rollout", "score", "response"),
        ("score", "advantages", "rewards"),
        ("old", "train", "old_logprobs"),
        ("reference", "train", "ref_logprobs"),
        ("advantages", "train", "advantages"),
    ],
)
def test_a_skipped_stage_is_an_error_that_names_it_and_its_column(
    cluster, skipped, stops_at, column
):
    loop = Loop(cluster).run([n for n in ALL[: ALL.index(stops_at)] if n != skipped])
    with pytest.raises(TimeoutError) as caught:
        loop.run([stops_at])
    said = str(caught.value)
    assert f"stage {stops_at!r} got no" in said
    assert repr(column) in said
    if skipped == "rollout":  # the graph has no text
        assert "written by rollout.generate" in said
    elif skipped != "driver":
        assert f"stage {skipped!r} writes it" in said
        assert f"{ROWS} rows without {column!r}" in said
    assert loop.actor.version == 0
