"""The dock on four raylets: rows stay where they were made, and a lost node is made good."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RUN = """
import json, sys, time
import numpy as np
sys.path.insert(0, TESTS)
from conftest import several_nodes
import rlkit as rk
from functools import partial
from rlkit.dock import GRPO
from rlkit.dock.samplers import whole_groups

class Hand:
    def __init__(self, dock, context):
        self.dock, self.rank = dock, context.dp_rank

    def node(self):
        return self.dock.node

    def generate(self):
        import torch
        uids = np.arange(4) + 100 * self.rank
        rows = {"response_ids": [torch.arange(1000)] * 4, "prompt_ids": [torch.arange(8)] * 4}
        self.dock.put(rows, uids, stage="rollout", group_ids=np.full(4, self.rank))

    def share(self):
        uids = 1000 + 10 * np.arange(4) + self.rank
        groups = 1000 + np.arange(4)
        self.dock.put({"answer": uids.tolist()}, uids, stage="rollout", group_ids=groups)

    def whole(self):
        lease = self.dock.get("teach", ["answer"], 4, partial(whole_groups, group_size=4))
        return lease.batch["group_ids"].tolist(), lease.batch["answer"].tolist()

    def judge(self, n):
        import torch
        lease = self.dock.get("score", ["response_ids"], n, timeout_s=60)
        self.dock.put({"rewards": torch.ones(n)}, lease.uids, stage="score")
        self.dock.ack(lease)
        return lease.uids.tolist()

nodes = several_nodes(4)
with rk.launch(address=nodes.address) as cluster:
    dock = cluster.dock(graph=GRPO, lease_s=60.0, timeout_s=60.0)
    hands = cluster.spawn(Hand, dock, n=4, name="hands")
    homes = hands.node()
    before = cluster.store.received_bytes
    hands.generate()
    judged = hands.judge(4)
    moved = dock.traffic()
    received = cluster.store.received_bytes - before
    hands.share()
    split = hands.whole()
    away = next(i for i in range(4) if homes[i] != dock.node)
    lost_node = homes[away]
    (raylet,) = [n for n in nodes.worker_nodes if n.node_id == lost_node]
    nodes.remove_node(raylet)
    start = time.time()
    lost = dock.lost(lost_node)
    lost_s = time.time() - start
    left = [uid for rank in range(4) for uid in range(100 * rank, 100 * rank + 4)]
    left = [uid for uid in left if uid not in lost]
    whole = dock.fetch(left, ["response_ids"])["response_ids"]
    dock.put({"response_ids": [whole[0]] * len(lost)}, lost, stage="rollout")
    again = dock.fetch(lost, ["response_ids"])["response_ids"]
    parts = lost[lost >= 1000]
    dock.put({"answer": parts.tolist()}, parts, group_ids=1000 + (parts - 1000) // 10)
    rejoined = dock.get("teach", ["answer"], 16, partial(whole_groups, group_size=4))
    print(json.dumps(dict(
        homes=homes, judged=judged, received=received, lost=lost.tolist(), away=away,
        lost_s=lost_s, again=list(again.shape), moved=moved.to_dict("records"),
        split=split, rejoined=rejoined.batch["answer"].tolist(),
    )))
nodes.shutdown()
"""


@pytest.fixture(scope="module")
def found():
    tests = str(Path(__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("TESTS", repr(tests))],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_stage_gets_every_row_once_from_four_nodes(found):
    assert len(set(found["homes"])) == 4
    rows = sorted(uid for uids in found["judged"] for uid in uids)
    assert rows == [100 * rank + i for rank in range(4) for i in range(4)]


def test_a_put_stays_on_its_node_and_a_get_pulls_from_there(found):
    by_stage = {stage: [] for stage in ("rollout", "score")}
    for row in found["moved"]:
        by_stage[row["stage"]].append(row)
    assert all(row["source"] == row["target"] for row in by_stage["rollout"])
    assert sum(row["bytes"] for row in by_stage["rollout"]) == 16 * 1008 * 8
    read, written = 16 * 1000 * 8, 16 * 4
    assert sum(row["bytes"] for row in by_stage["score"]) == read + written
    assert {row["source"] for row in found["moved"]} <= set(found["homes"])
    assert all(row["messages"] > 0 and row["seconds"] > 0 for row in found["moved"])


def test_the_driver_receives_metadata_only(found):
    print(f"the driver received {found['received']:,} bytes of {16 * 1008 * 8:,}")
    assert found["received"] < 8000


def test_a_lost_node_is_reported_exactly_and_the_run_goes_on(found):
    """Rows that had any column there: generated there, or judged there."""
    print(f"dock.lost took {found['lost_s']:.1f} s")
    away = found["away"]
    expected = {100 * away + i for i in range(4)} | set(found["judged"][away])
    expected |= {1000 + 10 * group + away for group in range(4)}
    assert found["lost"] == sorted(expected)
    assert found["again"] == [len(expected), 1000]


def test_groups_split_over_all_nodes_are_leased_whole_also_when_a_node_is_lost(found):
    rows = {1000 + g: [1000 + 10 * g + rank for rank in range(4)] for g in range(4)}
    assert {groups[0] for groups, _ in found["split"]} == set(rows)
    for groups, answers in found["split"]:
        assert len(set(groups)) == 1
        assert sorted(answers) == rows[groups[0]]
    assert sorted(found["rejoined"]) == sorted(uid for uids in rows.values() for uid in uids)
