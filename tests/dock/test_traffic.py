import pytest
import torch

from rlkit.batch.rows import Rows
from rlkit.dock import (
    GRPO,
    CentralDock,
    Graph,
    LocalTransport,
    Stage,
    TransferDock,
    predicted_traffic,
)

GROUPS, N, PROMPT, RESPONSE = 4, 4, 5, 7
NODES = ("a", "b")
DTYPES = {"response_mask": torch.int8, "rollout_logprobs": torch.float32}
DTYPES |= dict.fromkeys(("old_logprobs", "ref_logprobs"), torch.float32)


def column(name, n):
    """n rows of a column as rlkit's workers write it."""
    if name in ("rewards", "advantages"):
        return torch.zeros(n)
    length = PROMPT if name == "prompt_ids" else RESPONSE
    values = torch.zeros(n * length, dtype=DTYPES.get(name, torch.int64))
    return Rows(values, torch.full((n,), length))


def run(dock):
    """GRPO's flow of one batch; the nodes take turns, half the rows each."""
    rows = GROUPS * N
    for stage in GRPO.stages:
        for node in NODES if stage.reads else NODES[:1]:
            here, n = dock.at(node=node), rows // 2 if stage.reads else rows
            uids = range(rows)
            if stage.reads:
                lease = here.get(stage.name, stage.reads, n)
                uids = lease.uids
            if stage.writes:
                here.put({c: column(c, n) for c in stage.writes}, uids, stage=stage.name)
            if stage.reads:
                here.ack(lease)


@pytest.mark.parametrize(("kind", "central"), [(TransferDock, False), (CentralDock, True)])
def test_predicted_bytes_by_stage_are_those_counted(kind, central):
    dock = kind(LocalTransport(NODES, graph=GRPO), timeout_s=0)
    run(dock)
    table = predicted_traffic(GRPO, GROUPS, N, PROMPT, RESPONSE, nodes=NODES, central=central)
    counted = dock.traffic()
    by_stage = counted.groupby("stage")["bytes"].sum()
    assert table.groupby("stage")["bytes"].sum().to_dict() == by_stage.to_dict()
    if central:  # where rows lie is certain, so pairs agree, too
        merged = table.merge(counted, on=["stage", "source", "target"], how="outer")
        assert (merged["bytes_x"] == merged["bytes_y"]).all()


def test_a_prediction_names_what_it_needs():
    with pytest.raises(TypeError, match="nodes: got 2, need a list of so many names"):
        predicted_traffic(GRPO, 2, 3, 10, 100, nodes=2)
    with pytest.raises(ValueError, match=r"sizes: got none of \['text'\], need one of each"):
        predicted_traffic(Graph((Stage("judge", reads=("text",)),)), 2, 3, 10, 100)


def test_predicted_bytes_by_hand():
    # 2 prompts x 3 responses, 10 prompt and 100 response tokens, one node; int64 ids, int8 mask
    table = predicted_traffic(GRPO, 2, 3, 10, 100).set_index("stage")["bytes"].to_dict()
    assert table["driver"] == 6 * 80
    assert table["rollout"] == 6 * (80 + 800 + 100 + 400 + 800)
    assert table["old"] == table["reference"] == 6 * (80 + 800 + 100 + 400)
    assert table["train"] == 6 * (80 + 800 + 100 + 4 + 400 + 400)


def test_distributed_moves_as_many_bytes_and_fewer_through_one_node():
    nodes = [f"node{i}" for i in range(48)]  # 384 devices
    tables = [
        predicted_traffic(GRPO, 384, 32, 1024, 2048, nodes=nodes, central=central)
        for central in (False, True)
    ]
    totals = [table["bytes"].sum() for table in tables]
    assert totals[0] == pytest.approx(totals[1])
    busiest = [
        table[table["source"] != table["target"]]
        .melt("bytes", ["source", "target"])
        .groupby("value")["bytes"]
        .sum()
        .max()
        for table in tables
    ]
    assert busiest[0] < busiest[1] / 4  # the driver's node is the busiest: it has the prompts
