"""The transfer dock on Ray: values between processes, and what killed ones leave."""

import os
import signal
import time

import numpy as np
import pytest
import ray
import torch

from rlkit.dock import GRPO, StaleLeaseError

pytestmark = pytest.mark.ray


class Hand:
    """A worker that takes rows of a stage, and hands them on."""

    def __init__(self, dock, context):
        self.dock = dock.at(node=dock.transport.here, holder=f"{context.name}/{context.dp_rank}")
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


def test_rows_of_a_killed_holder_are_offered_again(ray_cluster, dock):
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
