"""Engines that die, stop or are updated one at a time, while a loop on Ray runs ahead."""

import itertools
import os
import signal
import time
from functools import partial

import numpy as np
import psutil
import pytest

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative
from rlkit.schedule import StalenessRule, asynchronous, one_step_off

pytestmark = pytest.mark.ray

SIZE, N = 4, 4
names = itertools.count()


def loss(logprobs, batch):
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


class Loop:
    """A loop with rollout workers in groups of ``ranks``; ``sync`` serves one group after another.

    Responses are long, so that there is always something half written.
    """

    def __init__(self, cluster, *, ranks=(2,), **options):
        model, number = rk.models.tiny(pretrained="reverse_digits"), next(names)
        self.task = rk.tasks.reverse_digits(seed=3)
        self.rollouts = [
            cluster.spawn(
                rk.RolloutWorker, model, n=n, max_new_tokens=40, name=f"feed_{number}_{i}"
            )
            for i, n in enumerate(ranks)
        ]
        self.actor = cluster.spawn(rk.ActorWorker, model, lr=1e-3, name=f"feed_actor_{number}")
        self.resharders = [rk.Resharder(source=self.actor, target=r) for r in self.rollouts]
        self.sync()
        self.feed = rk.RolloutFeed(
            self.rollouts, n=N, temperature=3.0, seconds=0.05, max_new_tokens=40, **options
        )
        stream = self.task.stream(size=SIZE)
        self.prompts = [next(stream) for _ in range(6)]

    def sync(self):
        for resharder in self.resharders:
            resharder.reshard()

    def prepare(self, batch):
        batch["rewards"] = rk.score(self.task.verify, batch)
        advantages = group_relative(batch["rewards"], batch["group_ids"])
        batch["advantages"] = batch.expand(advantages)

    def train(self, batch):
        batch["old_logprobs"] = self.actor.compute_logprobs(batch)
        return self.actor.update(batch, loss_fn=loss)

    def run(self, **rule):
        rule = StalenessRule(groups_per_step=SIZE, **{"max_staleness": 2} | rule)
        return asynchronous(self.prompts, self.feed, self.prepare, self.train, self.sync, rule=rule)


def kill(group, rank):
    """As the kernel's OOM killer does."""
    pid = int(group.frame()["pid"][rank])
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)


def finish(loop, found):
    """Add what the feed still has to give to ``found``; all of it in one batch."""
    while loop.feed.num_running:
        found += [batch for batch in [loop.feed.advance()] if batch is not None]
    return rk.Batch.concat(found)


def check_once(loop, records):
    groups = np.concatenate([record["batch"].meta["group_ids"] for record in records])
    found, counts = np.unique(groups, return_counts=True)
    asked = np.concatenate([batch.meta["group_ids"] for batch in loop.prompts])
    assert sorted(found) == sorted(asked)
    assert (counts == N).all()
    uids = np.concatenate([record["batch"].uids for record in records])
    assert len(set(uids)) == len(uids)


def check_versions(records):
    """No token is of weights older than the rule lets: new processes got the newest first."""
    for record in records:
        batch = record["batch"]
        versions = batch["token_version"][batch["response_mask"].bool()]
        assert record["step"] - int(versions.min()) <= 3
        assert int(versions.max()) <= record["step"]


def test_after_kill_9_of_one_of_two_workers_every_group_is_trained_once(ray_cluster, caplog):
    loop, records = Loop(ray_cluster), []
    for record in loop.run():
        records.append(record)
        if record["step"] == 1:
            kill(loop.rollouts[0], 1)
    check_once(loop, records)
    check_versions(records)
    assert "is started again: worker" in caplog.text
    assert loop.rollouts[0].begun() == [[], []]


@pytest.mark.slow
def test_a_worker_killed_in_a_train_step_is_back_before_the_weights_are_handed_over(ray_cluster):
    loop, records, train = Loop(ray_cluster), [], None
    train = loop.train

    def killing(batch):
        if loop.actor.version == 1:
            kill(loop.rollouts[0], 0)
        return train(batch)

    loop.train = killing
    records = list(loop.run())
    check_once(loop, records)
    check_versions(records)


def test_of_two_groups_the_other_goes_on_with_the_dead_ones_groups(ray_cluster, caplog):
    loop, records = Loop(ray_cluster, ranks=(1, 1)), []
    for record in loop.run():
        records.append(record)
        if record["step"] == 1:
            kill(loop.rollouts[0], 0)
    check_once(loop, records)
    check_versions(records)
    assert "the other rollout groups take its groups" in caplog.text


def test_weights_of_one_group_at_a_time_while_the_other_generates(ray_cluster):
    loop = Loop(ray_cluster, ranks=(1, 1))
    with rk.trace.use(rk.trace.Trace()) as trace:
        records = list(loop.run())
        frame = trace.frame()
    check_once(loop, records)
    assert [rollout.version for rollout in loop.rollouts] == [6, 6]
    first, second = (rollout.name for rollout in loop.rollouts)
    work = frame[frame["stage"] == "generate"]
    assert set(work["worker"]) == {f"{first}/0", f"{second}/0"}
    moves = frame[frame["stage"] == "reshard"]
    assert len(moves) == 12  # one move a step and group


def test_a_loop_that_is_left_leaves_nothing_in_any_engine(ray_cluster):
    loop = Loop(ray_cluster, ranks=(2, 1))
    for _ in loop.run(max_staleness=4):
        break
    assert [rollout.begun() for rollout in loop.rollouts] == [[[], []], []]
    assert loop.feed.num_running == 0


@pytest.mark.slow
def test_an_interrupt_in_a_step_on_ray_and_another_loop_goes_on(ray_cluster):
    loop = Loop(ray_cluster)
    backlog = rk.schedule.Backlog(loop.prompts)
    prompts, loop.prompts, train = loop.prompts, backlog, loop.train

    def slow(batch):
        if loop.actor.version == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        return train(batch)

    loop.train, records = slow, []
    with pytest.raises(KeyboardInterrupt):
        records.extend(loop.run())
    loop.train = train
    records += loop.run(version=loop.actor.version)
    loop.prompts = prompts
    check_once(loop, records)
    assert [record["step"] for record in records] == list(range(6))


@pytest.mark.slow
def test_one_step_off_goes_on_after_kill_9_of_a_rollout_worker(ray_cluster):
    loop, batches = Loop(ray_cluster), []
    backlog, (rollout,) = rk.schedule.Backlog(loop.prompts), loop.rollouts

    def generate(prompts, *, dies=True):
        if dies and len(batches) == 2:
            kill(rollout, 1)
        return rollout.generate(prompts, n=N, temperature=3.0)

    def train(batch):
        metrics = loop.train(batch)
        batches.append({"batch": batch})
        return metrics

    rest = (loop.prepare, train, loop.sync)
    with pytest.raises(RuntimeError, match="died"):
        list(one_step_off(backlog, generate, *rest))
    ray_cluster.respawn(rollout)
    loop.sync()
    list(one_step_off(backlog, partial(generate, dies=False), *rest))
    check_once(loop, batches)


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_named_with_its_groups(ray_cluster):
    loop, found = Loop(ray_cluster, ranks=(2,)), []
    pid = int(loop.rollouts[0].frame()["pid"][1])
    loop.feed.add(loop.prompts[0])
    found += [batch for batch in [loop.feed.advance()] if batch is not None]
    pipeline = loop.rollouts[0]._transport.pipeline
    pipeline.timeout_s = 2.0
    os.kill(pid, signal.SIGSTOP)
    try:
        named = r"waited \d+ s for feed_\d+_0/1 to generate .* \d groups .*ids \["
        with pytest.raises(TimeoutError, match=named):
            finish(loop, found)
    finally:
        os.kill(pid, signal.SIGCONT)
        pipeline.timeout_s = 600.0
    assert len(finish(loop, found)) == SIZE * N


@pytest.mark.slow
def test_a_group_respawned_by_hand_gets_its_groups_anew(ray_cluster):
    loop = Loop(ray_cluster)
    loop.feed.add(loop.prompts[0])
    early = loop.feed.advance()
    ray_cluster.respawn(loop.rollouts[0])
    loop.sync()
    assert len(finish(loop, [] if early is None else [early])) == SIZE * N


@pytest.mark.slow
def test_a_group_that_dies_again_and_again_is_given_up(ray_cluster, monkeypatch):
    monkeypatch.setattr("rlkit.cluster.feed.MOST_DEATHS", 1)
    loop = Loop(ray_cluster, ranks=(1,))
    loop.feed.add(loop.prompts[0])
    for expected in (True, False):
        kill(loop.rollouts[0], 0)
        with pytest.raises(RuntimeError, match="died"):
            finish(loop, [])
        assert loop.feed.mend(loop.sync) == expected
