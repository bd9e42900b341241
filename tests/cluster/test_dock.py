"""The transfer dock on Ray: values between processes, and what killed ones leave."""

import os
import signal
import time

import numpy as np
import pytest
import ray
import torch

from rlkit.batch import Batch
from rlkit.dock import GRPO, StaleLeaseError
from rlkit.dock.messages import ClosedError
from rlkit.rows import Rows
from rlkit.store import Column

pytestmark = pytest.mark.ray


class Hand:
    """A worker that takes rows of a stage, and hands them on."""

    def __init__(self, dock):
        self.dock = dock
        self.lease = None

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
        return Column(
            "twice",
            batch.store,
            batch.uids,
            [batch.store.put("twice", batch.uids, Rows(2 * batch["x"]))],
        )


@pytest.fixture
def dock(ray_cluster):
    dock = ray_cluster.dock(lease_s=4.0, timeout_s=20.0)
    yield dock
    dock.transport.close()


def controller_pid(dock, stage):
    return ray.get(dock.transport._of(stage).pid_of.remote(), timeout=60)


def test_rows_go_from_process_to_process(ray_cluster, dock):
    one, two = (ray_cluster.spawn(Hand, dock, name=name) for name in ("giver", "taker"))
    one.put(np.arange(6))
    found = two.take("generate", ["prompt_ids", "answer"], 6)
    assert found["answer"] == list("012345")
    assert found["prompt_ids"].dtype == torch.int64
    two.ack()
    with pytest.raises(TimeoutError, match="generate"):
        dock.get("generate", ["answer"], 1, timeout_s=0.2)
    moved = dock.traffic()
    assert set(moved["stage"]) == {"task", "generate"}
    assert moved["bytes"].min() > 0


def test_a_sampler_of_the_notebook_chooses(dock):
    dock.put({"answer": list("abcd")}, np.arange(4))
    newest = lambda rows, n: np.argsort(-rows.uids)[:n]
    assert dock.get("generate", ["answer"], 2, newest).batch["answer"] == ["d", "c"]


def test_a_killed_controller_forgets_neither_rows_nor_leases(dock):
    dock.put({"answer": list("abcd")}, np.arange(4))
    first = dock.get("generate", ["answer"], 1)
    dock.ack(first)
    held = dock.get("generate", ["answer"], 2)
    os.kill(controller_pid(dock, "generate"), signal.SIGKILL)
    rest = dock.get("generate", ["answer"], 1, timeout_s=60)
    found = [*first.uids, *held.uids, *rest.uids]
    assert sorted(found) == [0, 1, 2, 3]
    dock.ack(held)
    dock.ack(rest)


def test_a_worker_is_a_holder_by_its_name(ray_cluster, dock):
    hand = ray_cluster.spawn(Hand, dock, n=2, name="pair_of_hands")
    assert hand.holder() == ["pair_of_hands/0", "pair_of_hands/1"]


def test_the_lease_of_a_dead_worker_ends_with_the_call_that_notices(ray_cluster):
    dock = ray_cluster.dock(lease_s=600.0, timeout_s=20.0)
    dock.put({"answer": list("abc")}, np.arange(3))
    hand = ray_cluster.spawn(Hand, dock, name="dying_hand")
    hand.take("generate", ["answer"], 3)
    os.kill(hand.pid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="dying_hand/0 died"):
        hand.pid()
    assert sorted(dock.get("generate", ["answer"], 3).uids) == [0, 1, 2]


def test_rows_whose_holder_gives_no_heartbeat_are_offered_again(ray_cluster, dock):
    dock.put({"answer": list("abc")}, np.arange(3))
    hand = ray_cluster.spawn(Hand, dock, name="mortal_hand")
    hand.take("generate", ["answer"], 3)
    os.kill(hand.pid(), signal.SIGKILL)
    start = time.monotonic()
    again = dock.get("generate", ["answer"], 3, timeout_s=60)
    print(f"offered again after {time.monotonic() - start:.1f} s")
    assert sorted(again.uids) == [0, 1, 2]


def test_an_answer_that_comes_too_late_is_refused(dock):
    dock.put({"answer": ["a"]}, np.arange(1))
    slow = dock.at(holder="slow").get("generate", ["answer"], 1)
    fast = dock.at(holder="fast").get("generate", ["answer"], 1, timeout_s=30)
    with pytest.raises(StaleLeaseError, match="slow"):
        dock.ack(slow)
    dock.ack(fast)


def test_a_lost_store_process_names_the_rows_to_make_again(ray_cluster):
    dock = ray_cluster.dock(graph=GRPO, timeout_s=20.0)
    dock.put({"answer": list("abc")}, np.arange(3))
    node = dock.transport.here
    pid = ray.get(ray_cluster.store.actors[node].stats.remote(), timeout=30)["pid"]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LookupError, match=r"dock\.lost\("):
        dock.fetch([0], ["answer"])
    assert dock.lost(node).tolist() == [0, 1, 2]
    dock.put({"answer": list("abc")}, np.arange(3))
    assert dock.fetch([2, 0], ["answer"])["answer"] == ["c", "a"]
    dock.transport.close()


def test_a_stage_appears_with_the_first_get_of_any_process(ray_cluster, dock):
    dock.put({"answer": list("ab")}, np.arange(2))
    hand = ray_cluster.spawn(Hand, dock, name="first_hand")
    hand.take("judge", ["answer"], 2)
    assert "judge" in dock.transport.stages()
    hand.ack()
    assert dock.frame()["stage:judge"].tolist() == ["consumed", "consumed"]


def test_the_driver_hands_rows_on_without_their_values(ray_cluster, dock):
    x = torch.arange(400_000.0).reshape(4, -1)
    batch = Batch.from_columns({"x": x, "group_ids": [0, 0, 1, 1]}).on(ray_cluster.store)
    hand = ray_cluster.spawn(Hand, dock, name="doubling_hand")
    before = ray_cluster.store.received_bytes
    dock.put({"x": batch.columns["x"], "score": torch.ones(4)}, batch.uids, group_ids=[0, 0, 1, 1])
    lease = dock.get("double", ["x", "score"], 4)
    twice = hand.double(lease.batch)
    dock.put({"twice": twice}, lease.uids, stage="double")
    found = dock.fetch(lease.uids[::-1], ["twice", "x"])
    assert ray_cluster.store.received_bytes - before < 20_000
    assert lease.batch.meta["group_ids"].tolist() == [0, 0, 1, 1]
    assert torch.equal(found["twice"], 2 * x.flip(0))
    assert torch.equal(found["x"], x.flip(0))


def test_a_row_that_is_written_again_is_read_as_it_is_now(ray_cluster, dock):
    dock.put({"rewards": torch.zeros(3)}, np.arange(3))
    batch = dock.fetch(np.arange(3), ["rewards"])
    dock.put({"rewards": torch.ones(1)}, [1])
    assert batch["rewards"].tolist() == [0.0, 1.0, 0.0]


def test_rows_of_a_dock_that_is_gone_say_so(ray_cluster):
    dock = ray_cluster.dock()
    dock.put({"rewards": torch.zeros(3)}, np.arange(3))
    batch = dock.fetch(np.arange(3), ["rewards"])
    dock.transport.close()
    with pytest.raises(KeyError, match="freed, never written, or lost"):
        batch["rewards"]


def test_a_dock_draws_itself_soon_while_its_controllers_do_not_answer(dock):
    dock.put({"answer": list("abc")}, np.arange(3))
    first = dock.look(timeout_s=60)
    assert (first.num_rows, first.note) == (3, "")
    pid = controller_pid(dock, "driver")
    os.kill(pid, signal.SIGSTOP)
    try:
        look = dock.look(timeout_s=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "no answer of the controllers within 0.3 s. This is the look of" in look.note
    assert look.num_rows == 3
    assert dock.look(timeout_s=60).note == ""


def test_a_dock_that_is_closed_says_so(ray_cluster):
    dock = ray_cluster.dock()
    dock.put({"answer": list("abc")}, np.arange(3))
    dock.look(timeout_s=60)
    dock.transport.close()
    assert dock.look().gone
    assert "ClosedError: dock: view came after the dock was closed" in repr(dock)
    with pytest.raises(ClosedError):
        dock.put({"answer": ["d"]}, [3])
