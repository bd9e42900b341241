"""A loop that runs ahead is left, in every way there is, and another goes on."""

import threading
import time

import numpy as np
import pytest
from test_ahead import SlowFeed
from test_in_turn import Loop

import rlkit as rk
from rlkit.schedule import (
    Backlog,
    Inline,
    StalenessRule,
    Threads,
    ahead,
    asynchronous,
    one_step_off,
)

SIZE, RULE = 4, StalenessRule(groups_per_step=4, max_staleness=2)


@pytest.fixture
def loop():
    with rk.launch(backend="local") as cluster:
        yield Loop(cluster)


def engine_of(loop):
    return loop.rollout._transport.worker.engine


def start(loop, prompts, *, feed=None, executor=None, rule=RULE):
    feed = feed or rk.RolloutFeed(loop.rollout, n=4, seconds=0.002)
    parts = (loop.prepare, loop.train, loop.sync)
    return asynchronous(prompts, feed, *parts, executor or Threads(), rule=rule)


def groups_of(records):
    return [group for r in records for group in dict.fromkeys(r["batch"].meta["group_ids"])]


def fails(number, error):
    """A stand-in for a part of the loop that raises in its ``number``-th call."""

    def wrap(call):
        calls = [0]

        def part(*args):
            calls[0] += 1
            if calls[0] == number:
                raise error
            return call(*args)

        return part

    return wrap


# ---- nothing half written stays in the engines ----


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_a_loop_that_is_left_leaves_the_engine_empty(loop, executor):
    feed = rk.RolloutFeed(loop.rollout, n=4, seconds=0.002)
    for _ in start(loop, loop.prompts(9), feed=feed, executor=executor()):
        break
    assert not engine_of(loop).uids
    assert feed.num_running == 0


@pytest.mark.parametrize("part", ["train", "sync", "prepare"])
@pytest.mark.parametrize("error", [ArithmeticError("x"), KeyboardInterrupt()], ids=str)
def test_an_error_or_interrupt_in_a_part_leaves_the_engine_empty(loop, part, error):
    setattr(loop, part, fails(2, error)(getattr(loop, part)))
    with pytest.raises(type(error)):
        list(start(loop, loop.prompts(9), executor=Inline()))
    assert not engine_of(loop).uids
    assert len(loop.rollout.generate(loop.prompts(10)[-1], n=2)) == 12


def test_a_feed_is_empty_behind_its_with(loop):
    with rk.RolloutFeed(loop.rollout, n=4, seconds=0.001) as feed:
        feed.add(loop.prompts(1)[0])
        feed.advance()
        assert engine_of(loop).uids
    assert not engine_of(loop).uids
    assert repr(feed) == "RolloutFeed(groups running: none)"


def test_a_closed_feed_may_be_used_again(loop):
    feed, (prompts,) = rk.RolloutFeed(loop.rollout, n=2, seconds=0.01), loop.prompts(1)
    for _ in range(2):
        feed.add(prompts)
        feed.advance()
        feed.close()
    feed.add(prompts)
    found = []
    while feed.num_running:
        found += [batch for batch in [feed.advance()] if batch is not None]
    assert len(rk.Batch.concat(found)) == 12


def test_closing_behind_the_clusters_end_is_no_error():
    with rk.launch(backend="local") as cluster:
        loop = Loop(cluster)
        feed = rk.RolloutFeed(loop.rollout, seconds=0.001)
        feed.add(loop.prompts(1)[0])
        feed.advance()
    feed.close()


# ---- another loop goes on ----


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_after_a_break_every_group_is_still_trained_once(loop, executor):
    prompts = loop.prompts(4)  # of 6
    backlog, records = Backlog(prompts), []
    while not records or records[-1] is not None:
        rule = RULE.rebase(version=loop.actor.version)
        records.append(next(start(loop, backlog, rule=rule, executor=executor()), None))
    trained = groups_of(records[:-1])
    assert [record["step"] for record in records[:-1]] == list(range(6))
    assert sorted(trained) == sorted(g for batch in prompts for g in batch.meta["group_ids"])


@pytest.mark.parametrize("part", ["train", "sync", "prepare"])
def test_after_an_interrupt_in_a_part_every_group_is_trained(loop, part):
    prompts, records, whole = loop.prompts(4), [], getattr(loop, part)
    backlog = Backlog(prompts)
    setattr(loop, part, fails(2, KeyboardInterrupt())(whole))
    with pytest.raises(KeyboardInterrupt):
        records.extend(start(loop, backlog, executor=Inline()))  # keeps those before it
    setattr(loop, part, whole)
    loop.sync()
    rule = RULE.rebase(version=loop.actor.version)
    records += start(loop, backlog, executor=Inline(), rule=rule)
    trained, wanted = groups_of(records), [g for p in prompts for g in p.meta["group_ids"]]
    assert len(trained) == len(set(trained))
    lost = 4 if part == "sync" else 0  # trained, and their record was never seen
    assert len(trained) == len(wanted) - lost
    assert loop.actor.version == 6


def test_what_was_ready_is_not_generated_again(loop):
    feed = SlowFeed(loop)
    backlog, generated = Backlog(loop.prompts(2)), []
    advance = feed.advance

    def counted():
        chunk = advance()
        generated.extend(set(chunk.meta["group_ids"].tolist()))
        return chunk

    feed.advance = counted
    deadline_s = time.monotonic() + 60
    for _ in start(loop, backlog, feed=feed):
        while not backlog.ready and time.monotonic() < deadline_s:
            time.sleep(0.01)
        break
    ready = {int(group.meta["group_ids"][0]) for group in backlog.ready}
    list(start(loop, backlog, feed=feed, rule=RULE.rebase(version=1)))
    assert ready
    assert all(generated.count(group) == 1 for group in ready)


def test_a_rule_counts_what_is_ready(loop):
    backlog = Backlog(loop.prompts(4))
    next(start(loop, backlog, feed=SlowFeed(loop), executor=Inline()))
    num = len(backlog.ready)
    line = ahead._Line(
        backlog, SlowFeed(loop), loop.prepare, loop.sync, Inline(), RULE.rebase(version=1)
    )
    assert line.rule.accepted == 4 + num
    assert line.rule.running == 0


# ---- one step off ----


def one_off(loop, prompts, *, executor=None):
    parts = (loop.generate, loop.prepare, loop.train, loop.sync)
    return one_step_off(prompts, *parts, executor or Threads())


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_one_step_off_left_after_each_step_trains_every_group_once(loop, executor):
    prompts, records = loop.prompts(4), []
    backlog = Backlog(prompts)
    while (record := next(one_off(loop, backlog, executor=executor()), None)) is not None:
        records.append(record)
        assert not engine_of(loop).uids
        with backlog.held() as batches:
            assert len(batches.get("unfinished", [])) == (6 if len(records) < 4 else 0)
    assert groups_of(records) == [g for batch in prompts for g in batch.meta["group_ids"]]


@pytest.mark.parametrize("part", ["generate", "prepare", "train", "sync"])
@pytest.mark.parametrize("executor", [Inline, Threads])
def test_one_step_off_interrupted_in_a_part_trains_every_group_once(loop, part, executor):
    prompts, records, whole = loop.prompts(4), [], getattr(loop, part)
    backlog = Backlog(prompts)
    error = ArithmeticError("x") if part == "generate" else KeyboardInterrupt()
    setattr(loop, part, fails(2, error)(whole))
    with pytest.raises(type(error)):
        records.extend(one_off(loop, backlog, executor=executor()))
    assert not engine_of(loop).uids
    setattr(loop, part, whole)
    loop.sync()
    generated = loop.events.count("generate")
    records += one_off(loop, backlog, executor=executor())
    trained, wanted = groups_of(records), [g for p in prompts for g in p.meta["group_ids"]]
    lost = wanted[6:12] if part == "sync" else []  # trained, and their record was never seen
    assert trained == [group for group in wanted if group not in lost]
    assert loop.actor.version == 4
    again = loop.events.count("generate") - generated
    assert again == {"generate": 3, "prepare": 3, "train": 2, "sync": 2}[part]


# ---- another process goes on ----


@pytest.mark.parametrize("executor", [Inline, Threads])
def test_a_resume_keeps_samples_prompts_and_counters(tmp_path, executor):
    trained, seen = [], {}
    for part in range(3):
        with rk.launch(backend="local") as cluster:
            loop, log = Loop(cluster), rk.MetricLog()
            checkpoint = rk.Checkpointer(tmp_path)
            stream = loop.task.stream(size=6)
            state = {"workers": {"actor": loop.actor}, "prompts": stream, "log": log}
            restored = checkpoint.load(**state)
            loop.sync()
            backlog = Backlog(stream, **restored.batches)
            for group in backlog.ready:
                expected = seen[int(group.meta["group_ids"][0])]
                assert group["response"] == expected
            rule = RULE.rebase(version=restored.next_step)
            assert restored.next_step == 2 * part
            for record in start(loop, backlog, rule=rule, executor=executor()):
                trained += groups_of([record])
                log.add(record["step"], {})
                with backlog.held() as batches:
                    checkpoint.save(record["step"], **state, batches=batches)
                    seen = {int(g.meta["group_ids"][0]): g["response"] for g in backlog.ready}
                if record["step"] % 2:
                    break
    assert len(trained) == len(set(trained)) == 24
    first = min(trained)
    assert max(trained) - first < 24 + 12 + 6  # groups of the start of the stream, none left out


def test_what_is_held_is_all_there_is(loop):
    backlog = Backlog(loop.prompts(3))
    wanted = {g for batch in loop.prompts(3) for g in batch.meta["group_ids"]}
    for record in start(loop, backlog, executor=Threads()):
        wanted -= set(record["batch"].meta["group_ids"])
        with backlog.held() as batches:
            found = np.concatenate([np.unique(b.meta["group_ids"]) for b in batches.values()])
        taken = len(found) == len(set(found))
        assert taken
        assert set(found) <= wanted
        assert len(wanted - set(found)) % 6 == 0  # batches that nobody has asked for yet


def test_an_empty_backlog_holds_nothing():
    backlog = Backlog([])
    with backlog.held() as batches:
        assert batches == {}
    assert backlog.begin() is None
    assert repr(backlog) == "Backlog(0 prompts waiting, 0 groups begun, 0 ready)"


# ---- waits name what they wait for ----


def test_a_feed_that_never_finishes_is_named_with_its_groups(loop, monkeypatch):
    monkeypatch.setattr(ahead, "WAIT_S", 0.3)
    feed = rk.RolloutFeed(loop.rollout, n=4, seconds=0.01)
    feed.advance = lambda: feed._begin()
    with pytest.raises(
        TimeoutError,
        match=r"waited 0.3 s for 4 more groups of RolloutFeed\(groups running: 12 on rollout/0\)",
    ):
        list(start(loop, loop.prompts(3), feed=feed))


def test_groups_that_are_prepared_for_ever_are_named(loop, monkeypatch):
    monkeypatch.setattr(ahead, "WAIT_S", 0.5)
    hold = threading.Event()
    loop.prepare = lambda batch: hold.wait(20)
    try:
        with pytest.raises(TimeoutError, match=r"\d+ batches of which are being prepared"):
            list(start(loop, loop.prompts(1), rule=RULE))
    finally:
        hold.set()
