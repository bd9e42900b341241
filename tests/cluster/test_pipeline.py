"""Several calls of one group on their way: order, failures, cancellation, what lives how long."""

import gc
import os
import signal
import sys
import textwrap
import threading
import time

import pytest
import torch

import rlkit as rk
from rlkit.batch import Batch

pytestmark = pytest.mark.ray


class Pair:
    """A worker of two ranks with a collective."""

    def __init__(self, context):
        self.context = context
        self.calls = []

    def note(self, what):
        self.calls.append(what)
        return list(self.calls)

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return "awake"

    def fail_on(self, rank, after_s=0.0):
        if self.context.dp_rank == rank:
            time.sleep(after_s)
            raise ZeroDivisionError("by design")
        self.sum()

    def sum(self):
        total = torch.ones(1)
        self.context.collective.sum_(total)
        return total.item()

    def mean(self, batch):
        return float(batch["response_ids"].sum())

    def think(self, batch):
        time.sleep(0.5)
        return batch


@pytest.fixture(scope="module")
def pair(ray_cluster):
    return ray_cluster.spawn(Pair, n=2, name="two")


@pytest.fixture(scope="module")
def one(ray_cluster):
    return ray_cluster.spawn(Pair, name="one")


def make_batch(rows=4):
    return Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([1, 4])] * rows,
            "response_ids": [torch.tensor([5, 2])] * rows,
            "response_mask": torch.ones(rows, 2, dtype=torch.int8),
        }
    )


def num_keys(cluster):
    import ray

    actors = cluster.store.actors.values()
    return sum(stats["keys"] for stats in ray.get([a.stats.remote() for a in actors], timeout=30))


def until(condition, *, wait_s=20):
    deadline = time.monotonic() + wait_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()


def test_calls_run_in_the_order_of_their_start(pair):
    futures = [pair.submit.note(i) for i in range(5)]
    assert futures[-1].result() == [[0, 1, 2, 3, 4]] * 2


def test_what_is_queued_behind_a_failed_call_is_not_run(pair):
    before = pair.note("before")
    failing = pair.submit.fail_on(1, after_s=2.0)  # the others are queued by then
    queued = [pair.submit.note("queued") for _ in range(3)]
    with pytest.raises(ZeroDivisionError, match="by design"):
        failing.result()
    for future in queued:
        with pytest.raises(RuntimeError, match=r"two.note: not run, for fail_on before it failed"):
            future.result()
    after = pair.note("after")
    assert all(len(a) == len(b) + 1 for a, b in zip(after, before, strict=True))
    assert pair.sum() == [2.0, 2.0]  # a process group of both again


def test_what_is_started_after_a_failure_has_come_is_run(pair):
    failing = pair.submit.fail_on(1)
    assert until(failing.done)
    assert pair.sum() == [2.0, 2.0]
    with pytest.raises(ZeroDivisionError):
        failing.result()


def test_a_queued_failure_is_raised_by_its_own_future(pair):
    first, second, third = (
        pair.submit.note(1),
        pair.submit.fail_on(0, after_s=2.0),
        pair.submit.sum(),
    )
    first.result()
    with pytest.raises(RuntimeError, match="not run"):
        third.result()
    for _ in range(2):  # once or often
        with pytest.raises(ZeroDivisionError):
            second.result()


def test_cancelling_a_queued_call_leaves_the_one_that_runs(one):
    running, queued = one.submit.sleep(1.0), one.submit.note("cancelled")
    queued.cancel()
    assert running.result() == "awake"
    with pytest.raises(RuntimeError, match="not run"):
        queued.result()
    assert "cancelled" not in one.note("later")


def test_cancelling_a_queued_call_of_two_ranks_leaves_those_around_it(pair):
    running, queued, later = pair.submit.sleep(1.0), pair.submit.sum(), pair.submit.sum()
    queued.cancel()
    assert running.result() == ["awake"] * 2
    with pytest.raises(RuntimeError, match="not run"):
        queued.result()
    assert later.result() == [2.0, 2.0]


def test_cancelling_the_running_call_stops_it(one):
    running = one.submit.sleep(60)
    time.sleep(0.5)
    running.cancel()
    with pytest.raises(RuntimeError, match="sleep: interrupted"):
        running.result(timeout_s=30)
    assert one.note("after it")[-1] == "after it"


def test_arguments_live_until_the_call_was_answered(one):
    batch = make_batch()
    sleeping, reading = one.submit.sleep(1.0), one.submit.mean(batch)
    del batch
    gc.collect()
    sleeping.result()
    assert reading.result() == 4 * 7


def test_the_result_of_a_forgotten_future_is_freed(one, ray_cluster):
    gc.collect()
    batch = make_batch()
    one.mean(batch)
    before = num_keys(ray_cluster)
    one.submit.think(batch)
    gc.collect()
    one.note("something else")
    assert until(lambda: num_keys(ray_cluster) <= before)


def test_two_threads_get_the_one_result(one):
    future, found = one.submit.think(make_batch()), []
    threads = [threading.Thread(target=lambda: found.append(future.result())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found[0] is found[1]
    assert found[0]["response_ids"].sum() == 4 * 7


def test_two_threads_call_one_group_of_two_ranks(pair):
    found = []

    def call():
        found.extend(pair.sum() for _ in range(10))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [[2.0, 2.0]] * 30


def test_a_failed_call_keeps_no_group_alive(ray_cluster):
    group = ray_cluster.spawn(Pair, n=2, name="forgotten")
    with pytest.raises(ZeroDivisionError):
        group.fail_on(0)
    del group
    gc.collect()
    assert "forgotten" not in ray_cluster.groups


def test_a_timeout_can_be_waited_for_again(one):
    future = one.submit.sleep(1.5)
    with pytest.raises(TimeoutError, match=r"one/0 did not answer within 0 s"):
        future.result(timeout_s=0.1)
    assert future.result() == "awake"


# ---- functions of the user ----


def test_a_function_beside_the_data_that_dies_is_replaced(ray_cluster):
    def dies(response_ids):
        os.kill(os.getpid(), signal.SIGKILL)

    batch = make_batch()
    with pytest.raises(RuntimeError, match=r"dies ended the process for .*died.* Call it again"):
        batch.on(ray_cluster.store).apply(dies, "response_ids")
    assert ones(batch.on(ray_cluster.store)) == [1.0] * 4


def test_a_reward_that_ends_its_process_is_named(ray_cluster):
    def deadly(prompt, response, answer):
        os._exit(1)

    texts = {name: ["a"] for name in ("prompt", "response", "answer")}
    batch = Batch.from_columns(texts).on(ray_cluster.store)
    for reward_fn, name in [
        (deadly, r"score\(.*deadly\)"),
        (rk.rewards.combine({"right": (deadly, 1.0)}), r"score\(Combined\(1 right\)\)"),
    ]:
        with pytest.raises(RuntimeError, match=rf"{name} ended the process") as caught:
            rk.score(reward_fn, batch)
        assert "respawn" not in str(caught.value)


def test_a_failure_that_nobody_asks_for_is_logged(one, pair, caplog):
    for group in (one, pair):
        group.submit.fail_on(0)
        gc.collect()
        assert until(group.submit.note("").done, wait_s=60)
        said = f"{group.name}.fail_on failed, and nobody asks for its result: ZeroDivisionError"
        assert caplog.text.count(said) == 1


def test_a_failure_that_is_raised_or_cancelled_is_not_logged(one, caplog):
    with pytest.raises(ZeroDivisionError):
        one.fail_on(0)
    future = one.submit.sleep(60)
    time.sleep(0.5)
    future.cancel()
    del future
    gc.collect()
    one.note("")
    assert "nobody asks" not in caplog.text


def ones(batch, value=lambda: 1.0):
    column = batch.apply(lambda ids: torch.full((len(ids),), value()), "response_ids")
    return column.load().tensor.tolist()


def test_a_lambda_uses_a_module_that_no_worker_can_import(ray_cluster, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        textwrap.dedent(
            """
            import only_there
            def twice(x): return only_there.TWO * x
            """
        )
    )
    (tmp_path / "only_there.py").write_text("TWO = 2")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    batch = make_batch().on(ray_cluster.store)
    assert ones(batch, lambda: float(only_here.twice(3))) == [6.0] * 4
    del sys.modules["only_here"], sys.modules["only_there"]


# ---- the store ----


def test_rows_of_a_dead_store_are_named_and_new_ones_can_be_written(ray_cluster, one):
    import ray

    batch = make_batch()
    one.mean(batch)
    moved = batch.on(ray_cluster.store)
    (pid,) = {ray.get(a.stats.remote(), timeout=30)["pid"] for a in moved.store.actors.values()}
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, KeyError), match=r"died|lost with the process"):
        one.mean(batch)

    def works():
        try:
            return one.mean(make_batch()) == 4 * 7
        except RuntimeError:
            return False

    assert until(works, wait_s=60)
    with pytest.raises(KeyError, match="lost with the process that"):
        moved["response_ids"]
