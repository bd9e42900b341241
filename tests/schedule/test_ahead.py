"""Schedules that generate ahead: what they train, how stale it is, and what they wait for."""

import numpy as np
import pytest
import torch
from test_in_turn import Loop

import rlkit as rk
from rlkit.schedule import Inline, StalenessRule, Threads, asynchronous, drop, mask, one_step_off


@pytest.fixture
def cluster():
    with rk.launch(backend="local") as cluster:
        yield cluster


class SlowFeed:
    """Finishes one group a turn, the way an engine with one slot does; its rows are of ``loop``."""

    interrupts = True

    def __init__(self, loop, *, interrupts=True):
        self.loop, self.interrupts = loop, interrupts
        self.waiting = []

    @property
    def num_running(self):
        return len(self.waiting)

    def add(self, prompts):
        self.waiting += [prompts.select([i]) for i in range(len(prompts))]

    def advance(self):
        self.loop.events.append("turn")
        return self.loop.rollout.generate(self.waiting.pop(0), n=4)

    def mend(self, sync):
        return False

    def close(self):
        self.waiting.clear()


def run(loop, rule, *, steps=3, feed=None, executor=None, size=6):
    prompts = loop.prompts(steps, size=size)
    feed = feed or rk.RolloutFeed(loop.rollout, n=4, seconds=0.01)
    executor = executor or Inline()
    parts = (loop.prepare, loop.train, loop.sync)
    return list(asynchronous(prompts, feed, *parts, executor, rule=rule))


def ages(record):
    batch, step = record["batch"], record["step"]
    return (step - batch["token_version"])[batch["response_mask"].bool()]


def test_staleness_0_trains_tokens_of_the_trainers_version_only(cluster):  # faults F4
    records = run(Loop(cluster), StalenessRule(groups_per_step=6))
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all((ages(record) == 0).all() for record in records)
    assert all(record["staleness/head_steps"] == 0 for record in records)


def test_staleness_0_trains_what_synchronous_trains(cluster):
    first, second = Loop(cluster), Loop(cluster)
    list(rk.schedule.synchronous(first.prompts(3), first.generate, first.prepare, first.train,
                                 first.sync))  # fmt: skip
    run(second, StalenessRule(groups_per_step=6))
    for name, value in first.weights().items():
        torch.testing.assert_close(second.weights()[name], value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_every_group_is_trained_once_and_whole(cluster, executor):
    loop = Loop(cluster)
    rule = StalenessRule(groups_per_step=4, max_staleness=2)
    records = run(loop, rule, steps=4, executor=executor())
    assert len(records) == 6
    groups = np.concatenate([record["batch"].meta["group_ids"] for record in records])
    found, counts = np.unique(groups, return_counts=True)
    assert len(found) == 24
    assert (counts == 4).all()


def test_generation_runs_ahead_as_far_as_the_rule_lets_it(cluster):
    loop = Loop(cluster)
    rule = StalenessRule(groups_per_step=2, max_staleness=3)
    records = run(loop, rule, steps=4, feed=SlowFeed(loop))
    heads = [record["staleness/head_steps"] for record in records]
    assert max(heads) <= 3
    assert max(heads) > 0
    assert all(int(ages(record).max()) <= 3 for record in records)


def test_the_same_run_inline_is_the_same_to_the_bit(cluster):
    def weights():
        loop = Loop(cluster)
        rule = StalenessRule(groups_per_step=2, max_staleness=3)
        run(loop, rule, steps=3, feed=SlowFeed(loop))
        return loop.weights()

    one, two = weights(), weights()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_groups_that_are_dropped_give_their_slot_back(cluster):
    loop = Loop(cluster)
    rule = StalenessRule(groups_per_step=2, max_staleness=0, stale_policy=never_the_first(loop))
    records = run(loop, rule, steps=2, feed=SlowFeed(loop))
    assert len(records) == 5  # of 12 groups one is dropped, and one fills no step


def never_the_first(loop):
    seen = []

    def policy(group, *, version, max_staleness):
        seen.append(group)
        return None if len(seen) == 1 else group

    return policy


def old_group(loop, *, versions):
    (prompts,) = loop.prompts(1, size=1)
    group = loop.rollout.generate(prompts, n=2)
    length = group["response_ids"].shape[1]
    table = torch.tensor(versions).repeat_interleave(length // len(versions) + 1)[:length]
    lengths = group.lengths("response_ids").tolist()
    group["token_version"] = [table[:n] for n in lengths]
    group.meta["policy_version"][:] = min(versions)
    return group


def test_drop_leaves_out_what_is_too_old(cluster):
    group = old_group(Loop(cluster), versions=[1, 2])
    assert drop(group, version=3, max_staleness=2) is group
    assert drop(group, version=4, max_staleness=2) is None


def test_mask_takes_old_tokens_out(cluster):
    group = old_group(Loop(cluster), versions=[1, 2])
    before = group["response_mask"].clone()
    assert torch.equal(mask(group, version=3, max_staleness=2)["response_mask"], before)
    after = mask(group, version=4, max_staleness=2)["response_mask"]
    assert torch.equal(after, before * (group["token_version"] == 2))
    assert after.dtype == before.dtype


def test_without_interrupts_no_response_has_two_versions(cluster):
    loop = Loop(cluster)
    feed = rk.RolloutFeed(loop.rollout, n=4, seconds=0.001, interrupts=False)
    rule = StalenessRule(groups_per_step=2, max_staleness=3)
    records = run(loop, rule, steps=3, feed=feed, executor=Threads())
    for record in records:
        batch = record["batch"]
        for versions, trainable in zip(
            batch["token_version"], batch["response_mask"].bool(), strict=True
        ):
            assert len(set(versions[trainable].tolist())) == 1


def test_an_error_in_prepare_reaches_the_loop(cluster):
    loop = Loop(cluster)
    loop.prepare = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(loop, StalenessRule(groups_per_step=6), executor=Threads())


def test_an_error_in_generation_reaches_the_loop(cluster):
    loop = Loop(cluster)
    feed = SlowFeed(loop)
    feed.advance = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(loop, StalenessRule(groups_per_step=6), feed=feed, executor=Threads())


def test_a_loop_that_is_left_stops_generating(cluster):
    loop = Loop(cluster)
    prompts = loop.prompts(50)
    feed = rk.RolloutFeed(loop.rollout, n=4, seconds=0.01)
    rule = StalenessRule(groups_per_step=2, max_staleness=2)
    schedule = asynchronous(
        prompts, feed, loop.prepare, loop.train, loop.sync, Threads(), rule=rule
    )
    next(schedule)
    schedule.close()
    running = feed.num_running
    assert running <= 8
    assert len(loop.rollout.generate(loop.prompts(60)[-1], n=4)) == 24


def test_one_step_off_trains_what_is_one_step_old(cluster):
    loop = Loop(cluster)
    parts = (loop.generate, loop.prepare, loop.train, loop.sync)
    records = list(one_step_off(loop.prompts(4), *parts, Inline()))
    assert [int(ages(record).max()) for record in records] == [0, 1, 1, 1]
    assert [int(ages(record).min()) for record in records] == [0, 1, 1, 1]
    assert len(records) == 4


def test_the_feed_says_which_group_is_twice(cluster):
    loop = Loop(cluster)
    feed = rk.RolloutFeed(loop.rollout, n=2, seconds=0.001)
    (prompts,) = loop.prompts(1)
    feed.add(prompts)
    with pytest.raises(ValueError, match="which is being generated"):
        feed.add(prompts)
    assert "6 waiting" in repr(feed)
    feed.advance()
    assert "on rollout/0" in repr(feed)


# ---- a function in place of a feed, a number in place of a rule ----


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_a_rollout_step_runs_as_far_ahead_as_the_number_says(cluster, executor):
    loop = Loop(cluster)
    parts = (loop.generate, loop.prepare, loop.train)
    records = list(asynchronous(loop.prompts(5), *parts, sync=loop.sync, executor=executor(),
                                max_staleness=2))  # fmt: skip
    assert [len(record["batch"]) for record in records] == [24] * 5  # 6 prompts, 4 responses each
    assert all((ages(record) <= 2).all() for record in records)
    uids = np.concatenate([record["batch"].uids for record in records])
    assert len(np.unique(uids)) == len(uids)


def test_a_rollout_step_at_staleness_0_trains_what_synchronous_trains(cluster):
    first, second = Loop(cluster), Loop(cluster)
    list(rk.schedule.synchronous(first.prompts(3), first.generate, first.prepare, first.train,
                                 first.sync))  # fmt: skip
    list(asynchronous(second.prompts(3), second.generate, second.prepare, second.train,
                      second.sync, max_staleness=0))  # fmt: skip
    for name, value in first.weights().items():
        torch.testing.assert_close(second.weights()[name], value, rtol=0, atol=1e-5)


def test_a_feed_takes_a_number_too_and_one_of_number_and_rule_is_needed(cluster):
    loop = Loop(cluster)
    feed = rk.RolloutFeed(loop.rollout, n=4, seconds=0.01)
    parts = (feed, loop.prepare, loop.train, loop.sync)
    assert len(list(asynchronous(loop.prompts(3), *parts, max_staleness=1))) == 3
    rule = StalenessRule(groups_per_step=6)
    for both in ({}, {"rule": rule, "max_staleness": 1}):
        with pytest.raises(TypeError, match="need one of them"):
            next(asynchronous(loop.prompts(1), *parts, **both))
    with pytest.raises(TypeError, match="got a Backlog and max_staleness=1, need a rule"):
        next(asynchronous(rk.schedule.Backlog(loop.prompts(1)), *parts, max_staleness=1))
