"""Wrong parts of a loop: each is named before anything is generated, and nothing is lost."""

from dataclasses import replace
from functools import partial

import pytest
from test_ahead import SlowFeed
from test_in_turn import Loop

import rlkit as rk
from rlkit.schedule import (
    Backlog,
    Inline,
    StalenessRule,
    Threads,
    asynchronous,
    one_step_off,
    streamed,
    synchronous,
)

RULE = StalenessRule(groups_per_step=2, max_staleness=1)


@pytest.fixture(scope="module")
def cluster():
    with rk.launch(backend="local") as cluster:
        yield cluster


@pytest.fixture
def loop(cluster):
    return Loop(cluster)


def start(loop, prompts=None, feed=None, **changed):
    parts = {"prepare": loop.prepare, "train_step": loop.train, "sync": loop.sync, "rule": RULE}
    prompts = loop.prompts(3, size=2) if prompts is None else prompts
    return asynchronous(prompts, feed or SlowFeed(loop), **parts | {"executor": Inline()} | changed)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prepare": None}, "prepare: got NoneType, need a function"),
        ({"train_step": {}}, "train_step: got dict, need a function"),
        ({"sync": object()}, "need a function or a method, such as resharder.reshard"),
        ({"feed": [1]}, r"feed: got list, need .* rk.RolloutFeed\(rollout"),
        ({"rule": 4}, r"rule: got 4, need StalenessRule\("),
        ({"executor": Inline}, r"executor: .* need one such as rk.schedule.Inline\(\)"),
        ({"prompts": 3}, "prompts: got int, need batches of prompts one after another"),
        ({"prompts": ["1>"]}, "prompts: got str, need batches of prompts"),
    ],
)
def test_a_wrong_part_is_named(loop, wrong, said):
    with pytest.raises(TypeError, match=said):
        next(start(loop, **wrong))
    assert loop.events == []


def test_a_rollout_group_is_no_feed_and_a_batch_no_stream_of_them(loop):
    with pytest.raises(TypeError, match="feed: got WorkerGroup, need one that generates by itself"):
        next(start(loop, feed=loop.rollout))
    with pytest.raises(TypeError, match="prompts: got Batch, need batches of prompts one after"):
        next(start(loop, prompts=loop.prompts(1)[0]))


@pytest.mark.parametrize("schedule", [synchronous, streamed, one_step_off])
def test_the_other_schedules_name_them_too(loop, schedule):
    with pytest.raises(TypeError, match="rollout_step: got WorkerGroup, need a function"):
        next(schedule(loop.prompts(1), loop.rollout, loop.prepare, loop.train, loop.sync))
    with pytest.raises(TypeError, match=r"sync: got Resharder, need a function .* resharder\.resh"):
        next(schedule(loop.prompts(1), loop.stream, loop.prepare, loop.train, loop.resharder))
    with pytest.raises(TypeError, match="prompts: got int"):
        next(schedule(3, loop.stream, loop.prepare, loop.train, loop.sync))
    with pytest.raises(TypeError, match="rollout_step: got None back, need the responses"):
        next(schedule(loop.prompts(1), lambda p: None, loop.prepare, loop.train, loop.sync))


@pytest.mark.parametrize(("back", "said"), [(None, "NoneType"), ({"step": 1}, r"\['step'\]")])
def test_a_train_step_without_metrics_is_an_error_and_trains_no_group_twice(loop, back, said):
    backlog = Backlog(loop.prompts(2, size=2))
    wrong = lambda batch: (loop.train(batch), back)[1]
    with pytest.raises(TypeError, match=f"train_step: got {said} back, need a dict of metrics"):
        next(start(loop, backlog, train_step=wrong))
    rule = RULE.rebase(version=loop.actor.version)
    assert [record["step"] for record in start(loop, backlog, rule=rule)] == [1]


# ---- the rule and its policy ----


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"groups_per_step": "4"}, "groups_per_step: got '4'"),
        ({"groups_per_step": 1.5}, "groups_per_step: got 1.5"),
        ({"max_staleness": "2"}, "max_staleness: got '2', need a number"),
        ({"max_running": 0.5}, "max_running: got 0.5"),
        ({"version": 0.5}, "version: got 0.5"),
        (
            {"stale_policy": "drop"},
            r"stale_policy: got 'drop', need a function of \(group, version",
        ),
        ({"stale_policy": lambda group: group}, r"need a function of \(group, version, max_stal"),
    ],
)
def test_a_wrong_rule_is_named_where_it_is_made(wrong, said):
    with pytest.raises(TypeError, match=said):
        StalenessRule(**{"groups_per_step": 4} | wrong)


def with_policy(policy):
    return StalenessRule(groups_per_step=2, max_staleness=1, stale_policy=policy)


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_a_policy_that_leaves_out_all_is_named_instead_of_generating_for_ever(loop, executor):
    none = lambda group, *, version, max_staleness: None
    endless = loop.task.stream(size=2)
    with pytest.raises(RuntimeError, match="stale_policy: left out 20 groups in a row"):
        next(start(loop, endless, rule=with_policy(none), executor=executor()))


def test_a_rule_without_any_bound_is_refused(loop):
    rule = StalenessRule(groups_per_step=2, max_staleness=float("inf"))
    with pytest.raises(ValueError, match="max_staleness: got inf without max_running"):
        next(start(loop, loop.task.stream(size=2), rule=rule))
    assert next(start(loop, rule=replace(rule, max_running=4)))["step"] == 0


def test_prompts_that_end_before_a_train_step_are_said(loop, caplog):
    assert list(start(loop, loop.prompts(1, size=1))) == []
    assert "ended before a train step, which takes 2 groups: 1 are ready, 0 were" in caplog.text


@pytest.mark.parametrize("back", [True, 0])
def test_a_policy_that_returns_no_group_is_named_and_the_group_stays_ready(loop, back):
    backlog = Backlog(loop.prompts(1, size=2))
    policy = lambda group, *, version, max_staleness: back
    with pytest.raises(TypeError, match=f"stale_policy: got {back} back, need the group"):
        next(start(loop, backlog, rule=with_policy(policy)))
    assert len(list(start(loop, backlog))) == 1


def test_a_rule_that_was_not_rebased_is_named(loop):
    list(start(loop))
    with pytest.raises(ValueError, match=r"rule: got version 0, need 3 or more.*rule\.rebase"):
        next(start(loop))


# ---- feeds ----


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"seconds": float("inf")}, ValueError, "seconds: got inf"),
        ({"seconds": "1"}, TypeError, "seconds: got '1'"),
        ({"temperature": "hot"}, ValueError, "temperature: got hot"),
        ({"temperature": -1}, ValueError, "temperature: got -1"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens: got 0"),
        ({"n": 1.5}, TypeError, "n: got 1.5"),
    ],
)
def test_a_wrong_option_of_a_feed_is_named_on_the_driver(loop, wrong, error, said):
    with pytest.raises(error, match=said):
        rk.RolloutFeed(loop.rollout, **wrong)


def test_a_feed_takes_rollout_groups_alone_and_each_once(loop):
    for wrong in (None, [], loop.actor, [loop.rollout, loop.rollout], [None]):
        with pytest.raises(TypeError, match="need a rollout group or a list of several"):
            rk.RolloutFeed(wrong)


def test_a_feed_says_which_prompts_it_can_not_add(loop):
    feed = rk.RolloutFeed(loop.rollout)
    with pytest.raises(TypeError, match="add: got list, need a batch of prompts"):
        feed.add([1])
    assert feed.num_running == 0


def test_two_loops_do_not_share_a_feed_or_a_rollout_group(loop):
    feed, other = (rk.RolloutFeed(loop.rollout, n=4, seconds=0.001) for _ in range(2))
    first = start(loop, loop.task.stream(size=2), feed, executor=Threads())
    next(first)
    feed.add(loop.prompts(1, size=1)[0])  # it runs, whatever the threads do
    with pytest.raises(RuntimeError, match="need one that nobody uses"):
        next(start(loop, feed=feed))
    with pytest.raises(RuntimeError, match="generates for another one, RolloutFeed"):
        next(start(loop, feed=other, rule=RULE.rebase(version=loop.actor.version)))
    first.close()
    rule = RULE.rebase(version=loop.actor.version)
    assert len(list(start(loop, feed=other, rule=rule))) == 3


def test_a_group_that_the_loop_did_not_begin_is_refused(loop):
    backlog, (prompts,) = Backlog([]), loop.prompts(1, size=1)
    with pytest.raises(RuntimeError, match="which this loop has not begun"):
        backlog.finish([prompts])


def test_staleness_0_holds_in_a_loop_after_one_that_ended_before_its_sync(loop):
    fails = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        next(start(loop, sync=fails))
    rule = StalenessRule(groups_per_step=2, version=loop.actor.version)
    assert rule.version == 1
    assert next(start(loop, rule=rule))["staleness/head_steps"] == 0


def test_threads_that_served_a_loop_are_not_used_again(loop):
    threads = Threads()
    assert len(list(start(loop, executor=threads))) == 3
    rule = RULE.rebase(version=loop.actor.version)
    with pytest.raises(RuntimeError, match=r"need new ones for each loop: executor=rk\.schedule"):
        next(start(loop, executor=threads, rule=rule))


def test_closing_a_loop_whose_policy_fails_gives_everything_back(loop):
    backlog = Backlog(loop.prompts(2, size=2))
    fails = partial(lambda group, version, max_staleness: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        next(start(loop, backlog, rule=with_policy(fails)))
    assert len(list(start(loop, backlog))) == 2
