"""A dock in a checkpoint: what was acknowledged stays so, what was leased is offered again."""

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.dock import GRPO, LocalTransport, StaleLeaseError


@pytest.fixture
def actor():
    with rk.launch(backend="local") as cluster:
        yield cluster.spawn(rk.ActorWorker, rk.models.tiny(), lr=1e-3)


def make_dock(nodes=("a", "b")):
    return rk.TransferDock(LocalTransport(nodes, graph=GRPO))


def filled(dock):
    """Eight rows in two partitions: some consumed by a stage, some leased, some complete."""
    ids = [torch.arange(n) for n in (3, 3, 1, 0, 2, 2)]
    groups = [0, 0, 1, 1, 2, 2]
    dock.put({"prompt_ids": ids}, range(6), group_ids=groups, policy_version=[4] * 6)
    dock.at(partition="val").put({"prompt_ids": ids[:2]}, [60, 61])
    dock.ack(dock.get("rollout", ["prompt_ids"], 2))
    held = dock.get("rollout", ["prompt_ids"], 1)
    dock.at(node="b").put({"response_ids": ids[:2], "rewards": [0.5, 1.0]}, [0, 1], stage="rollout")
    return held


def test_a_dock_comes_back_as_the_weights_know_it(actor, tmp_path):
    dock = make_dock()
    held = filled(dock)
    rk.Checkpointer(tmp_path).save(3, workers={"actor": actor}, docks={"flow": dock})
    again = make_dock(("c",))
    again.put({"prompt_ids": [torch.ones(9)]}, [77])  # of a run that never was
    restored = rk.Checkpointer(tmp_path).load(workers={"actor": actor}, docks={"flow": again})
    assert restored.batches == {}
    before, after = dock.frame(), again.frame()
    same = ["uid", "group", "version", "partition", "bytes"]
    assert before[same].equals(after[same])
    stages = after.set_index("uid")["stage:rollout"]
    assert stages.to_dict() == {0: "consumed", 1: "consumed"} | dict.fromkeys(
        (2, 3, 4, 5, 60, 61), "waiting"
    )
    found = again.fetch([1, 0], ["prompt_ids", "rewards"])
    assert found["rewards"].tolist() == [1.0, 0.5]
    assert found.lengths("prompt_ids").tolist() == [3, 3]
    lease = again.get("rollout", ["prompt_ids"], 4)
    assert lease.uids.tolist() == [2, 3, 4, 5]
    assert lease.token > held.token
    with pytest.raises(StaleLeaseError):
        again.ack(held)


def test_rows_freed_before_the_checkpoint_are_not_written_again(actor, tmp_path):
    dock = make_dock()
    filled(dock)
    dock.clear([4])
    rk.Checkpointer(tmp_path).save(0, workers={"actor": actor}, docks={"flow": dock})
    again = make_dock()
    rk.Checkpointer(tmp_path).load(workers={"actor": actor}, docks={"flow": again})
    again.put({"rewards": [1.0]}, [4])
    assert 4 not in again.frame()["uid"].tolist()


def test_an_empty_dock_is_saved_too(actor, tmp_path):
    rk.Checkpointer(tmp_path).save(0, workers={"actor": actor}, docks={"flow": make_dock()})
    again = make_dock()
    filled(again)
    rk.Checkpointer(tmp_path).load(workers={"actor": actor}, docks={"flow": again})
    assert len(again.frame()) == 0


def test_a_full_dock_is_put_back_whole(actor, tmp_path):
    dock = rk.TransferDock(LocalTransport(graph=GRPO, capacity=4))
    dock.put({"prompt_ids": [torch.ones(1)] * 4}, np.arange(4))
    for stage in ("rollout",):
        dock.ack(dock.get(stage, ["prompt_ids"], 4))
    rk.Checkpointer(tmp_path).save(0, workers={"actor": actor}, docks={"flow": dock})
    again = rk.TransferDock(LocalTransport(graph=GRPO, capacity=4))
    rk.Checkpointer(tmp_path).load(workers={"actor": actor}, docks={"flow": again})
    assert len(again.frame()) == 4
    with pytest.raises(TimeoutError, match="no room"):
        again.put({"prompt_ids": [torch.ones(1)]}, [9], timeout_s=0.1)


def test_a_dock_that_was_not_saved_is_named(actor, tmp_path):
    rk.Checkpointer(tmp_path).save(0, workers={"actor": actor})
    with pytest.raises(ValueError, match="got no dock 'flow' in this checkpoint"):
        rk.Checkpointer(tmp_path).load(workers={"actor": actor}, docks={"flow": make_dock()})
