"""The transfer dock on Ray: values between processes, and what killed ones leave."""

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest
import ray
import torch

from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column
from rlkit.dock import GRPO, Graph, LocalTransport, Stage, StaleLeaseError, TransferDock
from rlkit.dock.messages import ClosedError

pytestmark = pytest.mark.ray


class Hand:
    """A worker that takes rows of a stage, and hands them on."""

    def __init__(self, dock):
        self.dock = dock
        self.lease = None

    def use(self, dock):
        self.dock = dock

    def put(self, uids):
        ids = [torch.full((2 + int(uid) % 3,), int(uid)) for uid in uids]
        self.dock.put({"prompt_ids": ids, "answer": [str(u) for u in uids]}, uids, stage="task")

    def take(self, stage, columns, n):
        self.lease = self.dock.get(stage, columns, n, timeout_s=20)
        return {name: self.lease.batch[name] for name in columns}

    def ack(self):
        self.dock.ack(self.lease)

    def pid(self):
        return os.getpid()

    def holder(self):
        return self.dock.holder

    def double(self, batch):
        rows = Rows(2 * batch["x"])
        part = batch.store.put("twice", batch.uids, rows)
        return Column("twice", batch.store, batch.uids, [part])


@pytest.fixture(scope="module")
def the_dock(ray_cluster):
    dock = ray_cluster.dock(lease_s=4.0, timeout_s=20.0)
    yield dock
    dock.transport.close()


@pytest.fixture
def dock(the_dock, request):
    """A partition of its own for each test: one start of the controllers serves them all."""
    return the_dock.at(partition=request.node.name)


@pytest.fixture(scope="module")
def numbers():
    return itertools.count(0, 100)


@pytest.fixture
def uids(numbers):
    """Four uids that no other test has."""
    return next(numbers) + np.arange(4)


@pytest.fixture(scope="module")
def hand(ray_cluster, the_dock):
    return ray_cluster.spawn(Hand, the_dock, name="hand")


def controller_pid(dock, stage):
    return ray.get(dock.transport._of(stage).pid_of.remote(), timeout=60)


def test_rows_go_from_process_to_process(hand, dock, uids):
    hand.use(dock)
    hand.put(uids)
    lease = dock.get("judge", ["prompt_ids", "answer"], 4)
    assert lease.batch["answer"] == [str(uid) for uid in uids]
    assert lease.batch["prompt_ids"].dtype == torch.int64
    dock.ack(lease)
    found = hand.take("generate", ["prompt_ids", "answer"], 4)
    assert found["answer"] == [str(uid) for uid in uids]
    hand.ack()
    with pytest.raises(TimeoutError, match="generate"):
        dock.get("generate", ["answer"], 1, timeout_s=0.2)
    moved = dock.traffic()
    assert {"task", "generate"} <= set(moved["stage"])
    assert moved["bytes"].min() > 0


def test_a_sampler_of_the_notebook_chooses(dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    newest = lambda rows, n: np.argsort(-rows.uids)[:n]
    assert dock.get("generate", ["answer"], 2, newest).batch["answer"] == ["d", "c"]


def test_values_that_can_not_be_sent_are_named(dock, uids):
    with pytest.raises(TypeError, match="dock: put got values that can't be pickled"):
        dock.put({"lock": [threading.Lock()]}, uids[:1])


def test_a_put_interrupted_while_it_waits_keeps_no_room(ray_cluster):
    dock = ray_cluster.dock(graph=Graph((Stage("s", reads=("x",)),)), capacity=1, timeout_s=20)
    dock.put({"x": [1]}, [0])
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dock.put({"x": [2]}, [1])
    dock.ack(dock.get("s", ["x"], 1))
    dock.put({"x": [3]}, [2])
    assert dock.get("s", ["x"], 1).uids.tolist() == [2]
    dock.transport.close()


def test_a_killed_controller_forgets_neither_rows_nor_leases(dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    first = dock.get("generate", ["answer"], 1)
    dock.ack(first)
    held = dock.get("generate", ["answer"], 2)
    os.kill(controller_pid(dock, "generate"), signal.SIGKILL)
    rest = dock.get("generate", ["answer"], 1, timeout_s=60)
    found = [*first.uids, *held.uids, *rest.uids]
    assert sorted(found) == uids.tolist()
    dock.ack(rest)


def test_a_get_that_waits_outlives_its_controller(dock, uids):
    found = []
    get = lambda: found.append(dock.get("patient", ["answer"], 4, timeout_s=60).uids)
    thread = threading.Thread(target=get)
    thread.start()
    time.sleep(0.5)
    os.kill(controller_pid(dock, "patient"), signal.SIGKILL)
    dock.put({"answer": list("abcd")}, uids)
    thread.join(90)
    assert found[0].tolist() == uids.tolist()


def test_a_get_whose_controller_is_killed_still_ends_in_time(dock, uids):
    pid = controller_pid(dock, "patient")
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(TimeoutError, match="stage 'patient' got no 1 row with columns"):
        dock.get("patient", ["answer"], 1, timeout_s=2)


def test_a_snapshot_with_leased_rows_comes_back_twice_and_on_other_nodes(ray_cluster):
    dock = ray_cluster.dock(graph=Graph((Stage("train", reads=("x",)),)), timeout_s=20)
    other = dock.at(holder="other")
    x = torch.arange(1_200_000.0)  # an object of the store
    dock.put({"x": Rows(x, torch.full((4,), 300_000))}, range(4), group_ids=[0, 0, 1, 1])
    dock.ack(dock.get("train", ["x"], 1))
    held = other.get("train", ["x"], 2)
    saved = dock.snapshot()
    other.ack(held)
    local = TransferDock(LocalTransport(("a", "b")))
    for again in (dock, dock, local):
        again.restore(saved)
        with pytest.raises(StaleLeaseError):
            again.ack(held)
        lease = again.get("train", ["x"], 3)
        assert lease.uids.tolist() == [1, 2, 3]
        assert lease.batch["group_ids"].tolist() == [0, 1, 1]
        assert torch.equal(lease.batch["x"].flatten(), x[300_000:])
        again.ack(lease)
    dock.restore(local.snapshot())
    assert len(dock.frame()) == 3
    dock.transport.close()


def test_a_worker_is_a_holder_by_its_name(hand):
    assert hand.holder() == "hand/0"


def test_the_lease_of_a_dead_worker_ends_with_the_call_that_notices(ray_cluster):
    dock = ray_cluster.dock(lease_s=600.0, timeout_s=20.0)
    dock.put({"answer": list("abc")}, np.arange(3))
    hand = ray_cluster.spawn(Hand, dock, name="dying_hand")
    hand.take("generate", ["answer"], 3)
    os.kill(hand.pid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="dying_hand/0 died"):
        hand.pid()
    assert sorted(dock.get("generate", ["answer"], 3).uids) == [0, 1, 2]


def test_rows_whose_holder_gives_no_heartbeat_are_offered_again(hand, dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    hand.use(dock)
    hand.take("generate", ["answer"], 4)
    start = time.monotonic()
    again = dock.get("generate", ["answer"], 4, timeout_s=60)
    print(f"offered again after {time.monotonic() - start:.1f} s")
    assert sorted(again.uids) == uids.tolist()


def test_an_interrupted_get_takes_none_of_the_rows_that_come_later(dock, uids):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        dock.get("generate", ["answer"], 4, timeout_s=60)
    dock.put({"answer": list("abcd")}, uids)
    assert len(dock.get("generate", ["answer"], 4, timeout_s=2)) == 4  # leases last 4 s


def test_values_of_another_dtype_are_refused_where_they_are_put(dock, uids):
    dock.put({"judged": torch.zeros(2)}, uids[:2])
    with pytest.raises(TypeError, match="judged: got scalar int64 values, need scalar float32"):
        dock.put({"judged": [1, 0]}, uids[2:])


def test_an_answer_that_comes_too_late_is_refused(dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    slow = dock.at(holder="slow").get("generate", ["answer"], 4)
    fast = dock.at(holder="fast").get("generate", ["answer"], 4, timeout_s=30)
    with pytest.raises(StaleLeaseError, match="slow"):
        dock.ack(slow)
    dock.ack(fast)


def test_a_stage_appears_with_the_first_get_of_any_process(hand, dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    hand.use(dock)
    hand.take("censor", ["answer"], 4)
    assert "censor" in dock.transport.stages()
    hand.ack()
    frame = dock.frame().set_index("uid")
    assert frame.loc[uids, "stage:censor"].tolist() == ["consumed"] * 4


def test_the_driver_hands_rows_on_without_their_values(ray_cluster, hand, dock, uids):
    x = torch.arange(400_000.0).reshape(4, -1)
    groups = [7, 7, 8, 8]
    batch = Batch.from_columns({"x": x, "uid": uids, "group_ids": groups}).on(ray_cluster.store)
    before = ray_cluster.store.received_bytes
    columns = {"x": batch.columns["x"], "score": torch.ones(4)}
    dock.put(columns, batch.uids, group_ids=groups)
    lease = dock.get("double", ["x", "score"], 4)
    twice = hand.double(lease.batch)
    dock.put({"twice": twice}, lease.uids, stage="double")
    found = dock.fetch(lease.uids[::-1], ["twice", "x"])
    assert ray_cluster.store.received_bytes - before < 20_000
    assert lease.batch.meta["group_ids"].tolist() == groups
    assert torch.equal(found["twice"], 2 * x.flip(0))
    assert torch.equal(found["x"], x.flip(0))


def test_a_row_that_is_written_again_is_read_as_it_is_now(dock, uids):
    dock.put({"rewards": torch.zeros(4)}, uids)
    batch = dock.fetch(uids, ["rewards"])
    dock.put({"rewards": torch.ones(1)}, uids[1:2])
    assert batch["rewards"].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_rows_of_a_dock_that_is_gone_say_so(ray_cluster):
    dock = ray_cluster.dock()
    dock.put({"rewards": torch.zeros(3)}, np.arange(3))
    batch = dock.fetch(np.arange(3), ["rewards"])
    dock.transport.close()
    with pytest.raises(KeyError, match="freed, never written, or lost"):
        batch["rewards"]


def test_a_dock_draws_itself_soon_while_its_controllers_do_not_answer(dock, uids):
    dock.put({"answer": list("abcd")}, uids)
    first = dock.look(timeout_s=60)
    assert first.num_rows >= 4
    assert first.note == ""
    pid = controller_pid(dock, "driver")
    os.kill(pid, signal.SIGSTOP)
    try:
        look = dock.look(timeout_s=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "no answer of the controllers within 0.3 s. This is the look of" in look.note
    assert look.num_rows == first.num_rows
    assert dock.look(timeout_s=60).note == ""


def test_a_dock_that_is_closed_says_so(ray_cluster):
    dock = ray_cluster.dock()
    dock.put({"answer": list("abc")}, np.arange(3))
    dock.look(timeout_s=60)
    dock.transport.close()
    assert dock.look().gone
    assert "came after the dock was closed" in repr(dock)
    with pytest.raises(ClosedError):
        dock.put({"answer": ["d"]}, [3])


def test_a_lost_store_process_names_the_rows_to_make_again(ray_cluster):
    dock = ray_cluster.dock(graph=GRPO, timeout_s=20.0)
    dock.put({"answer": list("abc")}, np.arange(3))
    node = dock.transport.here
    pid = ray.get(ray_cluster.store.actors[node].stats.remote(), timeout=30)["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LookupError, match=r"dock\.lost\("):
        dock.fetch([0], ["answer"]).columns["answer"].load()
    assert dock.lost(node).tolist() == [0, 1, 2]
    dock.put({"answer": list("abc")}, np.arange(3))
    assert dock.fetch([2, 0], ["answer"])["answer"] == ["c", "a"]
    dock.transport.close()
