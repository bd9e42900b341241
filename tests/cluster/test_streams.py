"""A worker's method that yields: its group hands on what any rank yields, as it comes."""

import os
import signal
import time

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column
from rlkit.workers.stages import stage

pytestmark = pytest.mark.ray


class Source:
    """Yields, slowly if told so."""

    def __init__(self, context):
        self.context = context

    def count(self, n, *, wait_s=0.0, fail_at=None):
        for i in range(n):
            if i == fail_at and self.context.dp_rank == 0:
                raise ZeroDivisionError("by design")
            time.sleep(wait_s)
            yield self.context.dp_rank, i, time.time()

    def batches(self, n):
        for i in range(n):
            uids = np.asarray([10 * self.context.dp_rank + i])
            yield Batch.from_columns({"x": torch.full((1, 3), float(i))}, uids=uids)

    def pid(self):
        return os.getpid()

    def echo(self, value):
        return value


class Slow:
    """Takes its time over a column."""

    @stage("later", column="later")
    def later(self, batch):
        time.sleep(1.5)
        rows = Rows(torch.zeros(len(batch)))
        part = batch.store.put("later", batch.uids, rows)
        return Column("later", batch.store, batch.uids, [part])


@pytest.fixture(scope="module")
def source(ray_cluster):
    return ray_cluster.spawn(Source, n=2, name="source")


def test_all_ranks_items_come_each_once_and_in_order(source):
    found = list(source.count(20))
    for rank in (0, 1):
        assert [i for r, i, _ in found if r == rank] == list(range(20))


def test_items_come_while_the_call_runs(source):
    for _, i, sent_s in source.count(4, wait_s=0.5):
        print(f"item {i} came {time.time() - sent_s:.3f} s after it was sent")
        if i < 3:
            assert time.time() - sent_s < 0.5 * (3 - i) + 0.4


def test_the_error_of_a_rank_is_raised_after_what_it_yielded(source):
    found, stream = [], source.count(50, wait_s=0.01, fail_at=3)
    with pytest.raises(ZeroDivisionError, match="by design"):
        found.extend(item for item in stream)
    assert [i for rank, i, _ in found if rank == 0] == [0, 1, 2]
    assert source.echo(1) == [1, 1]


def test_a_closed_stream_stops_its_call(source):
    stream = source.count(600, wait_s=0.1)
    next(stream)
    stream.close()
    assert list(stream) == []
    start = time.monotonic()
    assert source.echo(2) == [2, 2]
    print(f"usable after {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 30


def test_a_forgotten_stream_stops_its_call(source):
    for _ in source.count(600, wait_s=0.1):
        break
    assert source.echo(3) == [3, 3]


def test_a_stream_that_nobody_reads_holds_up_nothing(source):
    stream = source.count(10)
    assert source.echo(4) == [4, 4]
    assert len(list(stream)) == 20


def test_a_killed_rank_is_named(ray_cluster):
    group = ray_cluster.spawn(Source, n=1, name="mortal_source")
    pid, stream = group.pid(), group.count(600, wait_s=0.1)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="mortal_source/0 died"):
        list(stream)


def test_batches_are_handles_whose_rows_stay_where_they_were_made(ray_cluster):
    rollout = ray_cluster.spawn(
        rk.RolloutWorker, rk.models.tiny(), n=2, max_new_tokens=8, max_rows=4
    )
    prompts = next(rk.tasks.reverse_digits(seed=3).stream(size=6))
    before = ray_cluster.store.received_bytes
    chunks = list(rollout.stream(prompts, n=4))
    assert len(chunks) > 2
    batch = Batch.concat(chunks)
    assert all(column.store is ray_cluster.store for column in batch.columns.values())
    print(f"the driver received {ray_cluster.store.received_bytes - before:,} bytes")
    whole = rollout.generate(prompts, n=4, first_sample=np.zeros(6, dtype=np.int64))
    order = np.argsort(batch.meta["uid"]), np.argsort(whole.meta["uid"])
    for name in ("response_ids", "rollout_logprobs"):
        a, b = batch.select(order[0])[name], whole.select(order[1])[name]
        assert torch.equal(a, b), name


def test_submit_of_a_method_that_yields_says_what_to_do(source):
    with pytest.raises(AttributeError, match=r"source\.count\(\.\.\.\) starts it, too"):
        source.submit.count(3)


def test_a_column_that_is_being_computed_holds_up_no_function_of_others(source, ray_cluster):
    slow = ray_cluster.spawn(Slow)
    batch = Batch.from_columns({"x": torch.arange(3.0)}).on(ray_cluster.store)
    batch["later"] = slow.later(batch)
    doubled = batch.apply(lambda x: 2 * x, "x")
    assert doubled.load().tensor.tolist() == [0.0, 2.0, 4.0]
    assert batch.columns["later"].pending
