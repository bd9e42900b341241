import pickle
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.batch.rows import Rows
from rlkit.dock import (
    GRPO,
    CentralDock,
    Graph,
    LocalTransport,
    Peers,
    Stage,
    StaleLeaseError,
    TransferDock,
    keep_alive,
    samplers,
)
from rlkit.dock.messages import Request
from rlkit.dock.transport import ledger_node

FLOW = Graph(
    (
        Stage("driver", writes=("prompt_ids",)),
        Stage("rollout", reads=("prompt_ids",), writes=("response_ids",)),
        Stage("reference", reads=("response_ids",), writes=("ref_logprobs",)),
        Stage("train", reads=("response_ids", "ref_logprobs")),
    )
)


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def make_dock(nodes=("node0",), *, kind=TransferDock, **options):
    """A dock whose clock a test moves, and the clock."""
    clock = Clock()
    transport = LocalTransport(nodes, lease_s=10, clock=clock, **options)
    return kind(transport, holder="actor/0", timeout_s=0), clock


def put_numbers(dock, uids, **options):
    dock.put({"x": torch.tensor(list(uids))}, list(uids), **options)


# ---- faults.md E1: consumed is what was acknowledged ----


def test_rows_of_a_holder_that_dies_are_offered_again_after_the_lease():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    dock.get("train", ["x"], 4)
    other = dock.at(holder="actor/1")
    with pytest.raises(TimeoutError, match="actor/0 has 4 rows"):
        other.get("train", ["x"], 4)
    clock.now = 10
    assert other.get("train", ["x"], 4).uids.tolist() == [0, 1, 2, 3]


def test_acknowledged_rows_are_never_offered_again():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    dock.ack(dock.get("train", ["x"], 4))
    clock.now = 1000
    with pytest.raises(TimeoutError):
        dock.get("train", ["x"], 1)


def test_rows_of_a_holder_known_to_be_dead_are_offered_at_once():
    dock, _ = make_dock()
    put_numbers(dock, range(4))
    dock.get("train", ["x"], 4)
    assert dock.drop("actor/0")["train"].tolist() == [0, 1, 2, 3]
    assert len(dock.at(holder="actor/1").get("train", ["x"], 4)) == 4


def test_an_answer_after_the_lease_ran_out_is_refused():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    late = dock.get("train", ["x"], 4)
    clock.now = 10
    again = dock.at(holder="actor/1").get("train", ["x"], 4)
    assert again.token > late.token
    with pytest.raises(StaleLeaseError, match="ran out without a heartbeat"):
        dock.ack(late)
    with pytest.raises(StaleLeaseError):
        dock.nack(late)
    dock.ack(again)


def test_a_heartbeat_keeps_a_lease():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    lease = dock.get("train", ["x"], 4)
    for clock.now in (6, 12, 18):
        assert dock.heartbeat() == {"train": [lease.token]}
    dock.ack(lease)


def test_a_busy_holder_is_kept_alive_by_a_thread():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    lease = dock.get("train", ["x"], 4)
    with keep_alive(dock, every_s=0.01):
        for clock.now in (6, 12, 18):
            stop = time.monotonic() + 60
            while seat(dock) < clock.now + 10 and time.monotonic() < stop:
                time.sleep(0.01)
    dock.ack(lease)


def seat(dock):
    """When the one lease of the training stage runs out."""
    state = dock.transport.controllers("snapshot", {"train": ()})["train"].value
    return state["leases"][1].deadline


def test_acknowledging_twice_is_no_error():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)]}, [0])
    lease = dock.get("rollout", ["prompt_ids"], 1)
    dock.ack(lease)
    dock.ack(lease)


def test_rows_given_back_are_offered_at_once():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    dock.nack(dock.get("train", ["x"], 2))
    assert len(dock.get("train", ["x"], 2)) == 2


def test_every_stage_gets_every_row():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    for stage in ("reference", "train"):
        lease = dock.get(stage, ["x"], 2)
        dock.ack(lease)
        assert lease.batch["x"].tolist() == [0, 1]


# ---- E2: waits end, and say who is at fault ----


def test_a_lost_producer_is_named_with_its_rows_and_its_stage():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 2}, [4, 5])
    work = dock.at(holder="rollout/1").get("rollout", ["prompt_ids"], 2)
    dock.put({"response_ids": [torch.ones(3)]}, [4], stage="rollout")
    with pytest.raises(TimeoutError) as caught:
        dock.get("reference", ["response_ids"], 2)
    assert "1 row without 'response_ids' (uids 5)" in str(caught.value)
    assert "stage 'rollout' writes it, and rollout/1 has 1 row (uids 5)" in str(caught.value)
    dock.nack(work)
    with pytest.raises(TimeoutError, match="nobody has leased them"):
        dock.fetch([5], ["response_ids"])


def test_a_skipped_stage_is_named_with_its_column():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"response_ids": [torch.ones(2)]}, [7], stage="rollout")
    with pytest.raises(TimeoutError, match=r"without 'ref_logprobs' \(uids 7\); stage 'reference'"):
        dock.get("train", ["response_ids", "ref_logprobs"], 1)


def test_without_a_graph_the_error_says_who_usually_writes_a_column():
    dock, _ = make_dock()
    put_numbers(dock, [7])
    with pytest.raises(TimeoutError, match=r"written by reference\.compute_logprobs"):
        dock.fetch([7], ["ref_logprobs"])


def test_a_wait_ends_when_the_rows_come():
    dock = TransferDock()
    found = []
    thread = threading.Thread(target=lambda: found.append(dock.get("train", ["x"], 2)))
    thread.start()
    put_numbers(dock, [0])
    put_numbers(dock, [1])
    thread.join(60)
    assert found[0].batch["x"].tolist() == [0, 1]


def test_a_wait_ends_when_a_lease_runs_out():
    dock = TransferDock(LocalTransport(lease_s=0.2), timeout_s=60)
    put_numbers(dock, [0])
    dock.at(holder="dead").get("train", ["x"], 1)
    assert len(dock.get("train", ["x"], 1)) == 1


def test_an_error_of_the_sampler_reaches_the_caller():
    dock, _ = make_dock()
    put_numbers(dock, range(4))
    with pytest.raises(ValueError, match="need at most 2, each once"):
        dock.get("train", ["x"], 2, lambda rows, n: [0, 0])


# ---- E4: what goes in comes out ----


@pytest.mark.parametrize("lengths", [[3, 4], [3, 3]])
def test_ragged_rows_come_back_ragged_whatever_their_lengths(lengths):
    dock, _ = make_dock()
    rows = [torch.arange(length) for length in lengths]
    dock.put({"response_ids": rows}, [0, 1])
    column = dock.get("train", ["response_ids"], 2).batch.columns["response_ids"]
    assert column.parts[0].kind == "ragged"
    assert [row.tolist() for row in column.load().unpack()] == [row.tolist() for row in rows]


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([2**40, -1]),
        torch.tensor([0.5, 1.5], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1, 2], dtype=torch.int8),
        [torch.ones(2, dtype=torch.bfloat16), torch.ones(0, dtype=torch.bfloat16)],
        ["a", "ß"],
        [[1, 2], []],
        [{"k": 1}, None],
        [1, 2],
        [0.25, float("inf")],
    ],
    ids=str,
)
def test_types_come_back_as_they_went_in(values):
    dock, _ = make_dock(("a", "b"))
    dock.put({"x": values[:1]}, [0])
    dock.at(node="b").put({"x": values[1:]}, [1])
    found = dock.get("train", ["x"], 2).batch.columns["x"].load()
    for got, put in zip(found.unpack(), values, strict=True):
        if isinstance(put, torch.Tensor):
            assert got.dtype == put.dtype
            assert torch.equal(got, put)
        else:
            assert got == put


def test_rows_come_in_the_order_asked_for_from_several_nodes():
    dock, _ = make_dock(("a", "b", "c"))
    for i, node in enumerate("cabbca"):
        put_numbers(dock.at(node=node), [i])
    assert dock.fetch([4, 0, 5, 2, 1, 3], ["x"])["x"].tolist() == [4, 0, 5, 2, 1, 3]


# ---- E7: peers share, data-parallel ranks do not ----


def test_peers_get_the_same_rows_and_ranks_disjoint_ones():
    dock, _ = make_dock()
    put_numbers(dock, range(8))

    def get(rank, peer):
        peers = Peers(f"dp{rank}", 2, (1, 0))
        return dock.at(holder=f"{rank}.{peer}").get("train", ["x"], 4, peers=peers)

    leases = {(rank, peer): get(rank, peer) for peer in (0, 1) for rank in (0, 1)}
    assert leases[0, 0].uids.tolist() == leases[0, 1].uids.tolist()
    assert leases[1, 0].uids.tolist() == leases[1, 1].uids.tolist()
    assert not set(leases[0, 0].uids) & set(leases[1, 0].uids)


def test_rows_of_peers_are_consumed_when_all_acknowledge():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    peers = Peers("dp0", 2, (0,))
    first = dock.get("train", ["x"], 4, peers=peers)
    dock.ack(first)
    other = dock.at(holder="actor/1")
    dock.ack(other.get("train", ["x"], 4, peers=peers))
    clock.now = 100
    with pytest.raises(TimeoutError):
        dock.get("train", ["x"], 1)


def test_rows_are_offered_again_when_a_peer_never_comes():
    dock, clock = make_dock()
    put_numbers(dock, range(4))
    dock.get("train", ["x"], 4, peers=Peers("dp0", 2, (0,)))
    clock.now = 6
    dock.heartbeat()
    clock.now = 10
    assert len(dock.at(holder="other").get("train", ["x"], 4)) == 4


def test_a_peer_too_many_is_an_error():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    for holder in ("a", "b"):
        dock.at(holder=holder).get("train", ["x"], 2, peers=Peers("dp0", 2, (0,)))
    with pytest.raises(ValueError, match="need at most 2 processes"):
        dock.at(holder="c").get("train", ["x"], 2, peers=Peers("dp0", 2, (0,)))


# ---- E9: columns on first use ----


def test_a_column_never_declared_is_accepted_and_a_missing_one_lists_what_there_is():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"teacher_logp": [torch.ones(2)]}, [0])
    assert dock.fetch([0], ["teacher_logp"])["teacher_logp"].tolist() == [[1, 1]]
    with pytest.raises(TimeoutError, match=r"No row has \['teacher'\]; .*\['teacher_logp'\]"):
        dock.get("train", ["teacher"], 1)


# ---- A8 and groups ----


def test_ready_rows_of_two_groups_are_no_group():
    dock, _ = make_dock()
    three = partial(samplers.whole_groups, group_size=3)
    put_numbers(dock, [1, 2, 3], group_ids=[0, 0, 1])
    with pytest.raises(TimeoutError, match="incomplete groups"):
        dock.get("train", ["x"], 3, three)
    put_numbers(dock, [4, 5], group_ids=[1, 1])
    assert dock.get("train", ["x"], 3, three).uids.tolist() == [3, 4, 5]


# ---- partitions, capacity, least ----


def test_partitions_are_apart():
    dock, _ = make_dock()
    put_numbers(dock, [0])
    put_numbers(dock.at(partition="val"), [1])
    assert dock.at(partition="val").get("score", ["x"], 2, least=1).uids.tolist() == [1]
    assert dock.get("score", ["x"], 2, least=1).uids.tolist() == [0]


def test_a_full_dock_makes_writers_wait_and_names_the_stage_that_is_behind():
    dock, _ = make_dock(graph=FLOW, capacity=4)
    dock.put({"prompt_ids": [torch.ones(1)] * 4}, range(4))
    dock.put({"response_ids": [torch.ones(1)] * 4}, range(4), stage="rollout")  # no new rows
    with pytest.raises(TimeoutError, match="4 rows wait for stage 'rollout'"):
        dock.put({"prompt_ids": [torch.ones(1)]}, [9])
    assert len(dock.frame()) == 4


def test_a_group_that_has_begun_may_be_finished_in_a_full_dock():
    dock, _ = make_dock(graph=FLOW, capacity=2)
    dock.put({"prompt_ids": [torch.ones(1)] * 2}, [0, 1], group_ids=[0, 1])
    dock.put({"prompt_ids": [torch.ones(1)]}, [2], group_ids=[0])
    with pytest.raises(ValueError, match="need at most 2"):
        dock.put({"prompt_ids": [torch.ones(1)] * 3}, [5, 6, 7])


def test_a_waiting_writer_goes_on_when_rows_are_consumed():
    graph = Graph((Stage("train", reads=("x",)),))
    dock = TransferDock(LocalTransport(graph=graph, capacity=1))
    put_numbers(dock, [0])
    thread = threading.Thread(target=put_numbers, args=(dock, [1]))
    thread.start()
    dock.ack(dock.get("train", ["x"], 1))
    assert dock.get("train", ["x"], 1).uids.tolist() == [1]
    thread.join(60)


# ---- freeing ----


def run_flow(dock, n):
    """All stages of FLOW on the first n rows."""
    for stage, reads, writes in [
        ("rollout", ["prompt_ids"], "response_ids"),
        ("reference", ["response_ids"], "ref_logprobs"),
        ("train", ["response_ids", "ref_logprobs"], None),
    ]:
        lease = dock.get(stage, reads, n)
        if writes:
            dock.put({writes: [torch.ones(3)] * n}, lease.uids, stage=stage)
        dock.ack(lease)


def stats(dock):
    return dock.transport.warehouses("stats", dict.fromkeys(dock.transport.nodes, ()))


def test_rows_that_all_stages_consumed_are_freed():
    dock, _ = make_dock(("a", "b"), graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 6}, range(6))
    run_flow(dock.at(node="b"), 4)
    assert dock.frame()["uid"].tolist() == [4, 5]
    assert {n: r.value["nbytes"] for n, r in stats(dock).items()} == {"a": 2 * 2 * 4, "b": 0}


def test_a_late_write_of_a_freed_row_is_dropped():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)]}, [0])
    run_flow(dock, 1)
    dock.put({"response_ids": [torch.ones(2)]}, [0], stage="rollout")
    assert len(dock.frame()) == 0
    assert stats(dock)["node0"].value["nbytes"] == 0
    with pytest.raises(TimeoutError, match="consumed by all stages, or cleared"):
        dock.fetch([0], ["response_ids"], timeout_s=60)


def test_rows_whose_holder_died_before_their_release_are_swept():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)], "response_ids": [torch.ones(2)]}, [0])
    dock.put({"ref_logprobs": [torch.ones(2)]}, [0])
    for stage in FLOW.consumers:
        grant = dock.get(stage, ["response_ids"], 1).grant
        dock.transport.controllers("ack", {stage: (grant.token, grant.holder)})
    assert len(dock.frame()) == 1
    dock.sweep()
    assert len(dock.frame()) == 0


def test_a_column_written_again_replaces_the_old_one_on_every_node(caplog):
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, range(4))
    with caplog.at_level("INFO"):
        dock.at(node="b").put({"x": torch.tensor([9])}, [2])
    assert "column 'x' of 1 rows is written again" in caplog.text
    assert dock.fetch(range(4), ["x"])["x"].tolist() == [0, 1, 9, 3]
    dock.clear([0, 1, 3])
    assert {n: r.value["nbytes"] for n, r in stats(dock).items()} == {"a": 0, "b": 8}


def test_the_reader_of_a_lease_may_write_into_its_tensors():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    dock.get("a", ["x"], 2).batch["x"].zero_()
    assert dock.get("b", ["x"], 2).batch["x"].tolist() == [0, 1]


# ---- crashes ----


def test_a_controller_that_starts_late_knows_all_rows():
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, [3, 1], group_ids=[7, 7], policy_version=[2, 2])
    put_numbers(dock.at(node="b"), [0])
    batch = dock.get("train", ["x"], 3).batch
    assert batch.uids.tolist() == [3, 1, 0]
    assert batch["group_ids"].tolist() == [7, 7, 0]
    assert batch["policy_version"].tolist() == [2, 2, 0]


def test_a_controller_that_crashed_knows_leases_and_consumed_rows():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 6}, range(6))
    dock.ack(dock.get("rollout", ["prompt_ids"], 2))
    lease = dock.get("rollout", ["prompt_ids"], 2)
    dock.transport.kill("rollout")
    assert dock.at(holder="other").get("rollout", ["prompt_ids"], 2).uids.tolist() == [4, 5]
    dock.ack(lease)
    dock.ack(lease)
    assert dock.frame()["stage:rollout"].value_counts()["consumed"] == 4


def test_a_controller_that_crashed_never_gives_a_token_twice():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    late = dock.get("train", ["x"], 2)
    dock.drop("actor/0")
    dock.transport.kill("train")
    assert dock.get("train", ["x"], 2).token > late.token
    with pytest.raises(StaleLeaseError):
        dock.ack(late)


def test_rows_of_a_lost_node_are_reported_and_the_run_goes_on():
    dock, _ = make_dock(("a", "b"), graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 6}, range(6))
    far = dock.at(node="b", holder="rollout/1")
    lease = far.get("rollout", ["prompt_ids"], 2)
    far.put({"response_ids": [torch.ones(2)] * 2}, lease.uids, stage="rollout")
    far.ack(lease)
    dock.transport.lose("b")
    assert dock.lost("b").tolist() == [0, 1]
    assert dock.frame()["uid"].tolist() == [2, 3, 4, 5]
    dock.put({"prompt_ids": [torch.ones(2)] * 2}, [0, 1])
    run_flow(far, 6)
    assert len(dock.frame()) == 0


def test_a_lease_with_rows_of_a_lost_node_is_void():
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, [0])
    put_numbers(dock.at(node="b"), [1])
    lease = dock.get("train", ["x"], 2)
    dock.transport.lose("b")
    assert dock.lost("b").tolist() == [1]
    with pytest.raises(StaleLeaseError, match="lost rows with the node"):
        dock.ack(lease)
    put_numbers(dock.at(node="b"), [1])
    assert len(dock.get("train", ["x"], 2)) == 2


def test_leases_outlive_the_node_of_their_ledger():
    dock, _ = make_dock(("a", "b"))
    ledger = ledger_node("train", ("a", "b"))
    put_numbers(dock.at(node="b" if ledger == "a" else "a"), range(3))
    dock.ack(dock.get("train", ["x"], 1))
    lease = dock.get("train", ["x"], 1)
    dock.transport.lose(ledger)
    assert dock.lost(ledger).tolist() == []
    dock.transport.kill("train")
    dock.ack(lease)
    assert dock.get("train", ["x"], 1).uids.tolist() == [2]


def test_rows_that_training_consumed_need_not_be_made_again():
    graph = Graph((Stage("train", reads=("x",)),))
    dock, _ = make_dock(("a", "b"), graph=graph)
    graph_dock = dock.at(node="b")
    put_numbers(graph_dock, range(3))
    lease = dock.get("train", ["x"], 2)
    dock.transport.controllers("ack", {"train": (lease.token, "actor/0")})  # not yet freed
    dock.transport.lose("b")
    assert dock.lost("b").tolist() == [2]
    assert len(dock.frame()) == 0


# ---- snapshots ----


def test_leased_rows_of_a_snapshot_are_offered_again_and_consumed_ones_are_not():
    dock, _ = make_dock(("a", "b"), graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 4}, range(4), group_ids=[5, 5, 6, 6])
    dock.ack(dock.get("rollout", ["prompt_ids"], 1))
    leased = dock.get("rollout", ["prompt_ids"], 1)
    saved = dock.snapshot()
    dock.ack(dock.get("rollout", ["prompt_ids"], 2))
    dock.restore(saved)
    with pytest.raises(StaleLeaseError):
        dock.ack(leased)
    again = dock.get("rollout", ["prompt_ids"], 3)
    assert again.uids.tolist() == [1, 2, 3]
    assert again.batch["group_ids"].tolist() == [5, 6, 6]


def test_a_snapshot_goes_into_a_dock_of_other_nodes():
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, [0, 1], policy_version=[3, 4])
    put_numbers(dock.at(node="b", partition="val"), [2])
    dock.ack(dock.get("train", ["x"], 1))
    other, _ = make_dock(("c",))
    other.restore(dock.snapshot())
    assert other.get("train", ["x"], 1).batch["policy_version"].tolist() == [4]
    assert other.at(partition="val").get("score", ["x"], 1).batch["x"].tolist() == [2]


def test_a_snapshot_of_two_nodes_restored_twice_on_one_frees_what_all_consumed():
    two = Graph((Stage("score", reads=("x",), writes=("r",)), Stage("train", reads=("x",))))
    dock, _ = make_dock(("a", "b"), graph=two)
    put_numbers(dock, range(3))
    dock.ack(dock.get("score", ["x"], 2))
    dock.at(node="b").put({"r": torch.zeros(3)}, range(3), stage="score")
    other, _ = make_dock(("c",), graph=two)
    saved = pickle.loads(pickle.dumps(dock.snapshot()))
    for _ in range(2):
        other.restore(saved)
        assert len(other.frame()) == 3
        other.ack(other.get("train", ["x", "r"], 3))
        assert other.frame()["uid"].tolist() == [2]


def test_nobody_acknowledges_while_a_snapshot_is_taken():
    dock = TransferDock()
    put_numbers(dock, [0])
    lease = dock.get("train", ["x"], 1)
    dock.transport.controllers("freeze", {"train": ()}, limit_s=60)
    thread = threading.Thread(target=dock.ack, args=(lease,))
    thread.start()
    thread.join(0.1)
    assert dock.frame()["stage:train"].tolist() != ["consumed"]
    dock.transport.controllers("freeze", {"train": ()}, limit_s=0)
    thread.join(60)
    assert dock.frame()["stage:train"].tolist() == ["consumed"]


# ---- traffic, topologies, inspector ----


def test_traffic_counts_bytes_and_messages_by_stage_and_nodes():
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, range(3))
    put_numbers(dock.at(node="b"), range(3, 8), stage="rollout")
    dock.at(node="b").get("train", ["x"], 8)
    found = dock.traffic().set_index(["stage", "source", "target"])
    assert found["bytes"].to_dict() == {
        ("driver", "a", "a"): 24,
        ("rollout", "b", "b"): 40,
        ("train", "a", "b"): 24,
        ("train", "b", "b"): 40,
    }
    assert (found["messages"] == 1).all()
    assert (found["seconds"] > 0).all()


def test_central_dock_moves_everything_through_the_first_node():
    dock, _ = make_dock(("a", "b"), kind=CentralDock)
    put_numbers(dock.at(node="b"), range(4))
    assert dock.at(node="b").get("train", ["x"], 4).batch["x"].tolist() == [0, 1, 2, 3]
    pairs = dock.traffic()[["source", "target"]].to_records(index=False).tolist()
    assert pairs == [("b", "a"), ("a", "b")]


def test_inspector_shows_rows_by_column_and_stage():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": [torch.ones(2)] * 3}, range(3), policy_version=[1, 1, 2])
    dock.put({"response_ids": [torch.ones(4)]}, [0], stage="rollout")
    dock.ack(dock.get("rollout", ["prompt_ids"], 1))
    dock.get("rollout", ["prompt_ids"], 1)
    frame = dock.frame()
    assert frame["response_ids"].tolist() == ["node0", "empty", "empty"]
    assert frame["stage:rollout"].tolist() == ["consumed", "leased by actor/0", "waiting"]
    assert frame["bytes"].tolist() == [24, 8, 8]
    drawn = dock._repr_html_()
    assert "leased by actor/0" in drawn
    assert "policy versions" in drawn
    assert "TransferDock(3 rows, 40 bytes on 1 nodes" in drawn


def test_an_empty_dock_draws_itself():
    assert "0 rows" in TransferDock()._repr_html_()


def test_overwriting_one_reward_is_what_the_next_stage_reads():
    dock, _ = make_dock()
    dock.put({"rewards": torch.zeros(3)}, range(3), stage="score")
    dock.put({"rewards": torch.ones(1)}, [1])
    batch = dock.get("train", ["rewards"], 3).batch
    assert dict(zip(batch.uids.tolist(), batch["rewards"].tolist(), strict=True)) == {
        0: 0, 1: 1, 2: 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda d: d.put({"x": [1, 2]}, [0]), "got 2 rows, need 1"),
        (lambda d: d.put({"x": [1, 2]}, [0, 0]), "need one a row"),
        (lambda d: d.put({"x": [1]}, [0], group_ids=[1, 2]), "group_ids: got 2 values"),
        (lambda d: d.get("train", ["x"], 0), "n: got 0, need at least 1 row"),
        (lambda d: LocalTransport(capacity=3), "without a graph"),
    ],
)
def test_wrong_calls_say_what_is_needed(call, match):
    with pytest.raises(ValueError, match=match):
        call(TransferDock())


def test_rows_put_as_rows_are_not_copied():
    dock, _ = make_dock()
    values = torch.arange(6)
    dock.put({"x": Rows(values, torch.tensor([2, 4]))}, [0, 1])
    got = dock.get("train", ["x"], 2).batch.columns["x"].load()
    assert got.tensor.data_ptr() == values.data_ptr()


def test_grpo_graph_consumers_are_in_order():
    assert GRPO.consumers[-1] == "train"
    assert GRPO.writer("ref_logprobs") == "reference"
    assert GRPO.writer("nothing") is None
    assert np.all([GRPO.sizes[c].nbytes(1, 1) > 0 for s in GRPO.stages for c in s.reads])


# ---- what a caller may get wrong ----

grouped = lambda size: partial(samplers.whole_groups, group_size=size)
pairs = grouped(2)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda d: d.put([1], [1]), TypeError, "columns: got list, need a dict"),
        (lambda d: d.put({}, [1]), ValueError, "columns: got none"),
        (lambda d: d.put({"x": "ab"}, [1, 2]), TypeError, "x: got str, need 2 values"),
        (lambda d: d.put({"x": None}, [1]), TypeError, "x: got NoneType, need 1 values"),
        (lambda d: d.put({3: [1]}, [1]), TypeError, "columns: got 3, need a name"),
        (lambda d: d.put({"uid": [1]}, [1]), ValueError, "columns: got 'uid', which says what a"),
        (lambda d: d.put({"x": [1, 2, 3]}, [1, 2, 1]), ValueError, "some of them twice: 1;"),
        (lambda d: d.fetch([], ["x"]), ValueError, "uids: got none"),
        (lambda d: d.fetch([0], "x"), TypeError, r"need a list of names: \['x'\]"),
        (lambda d: d.get("s", "rewards", 1), TypeError, r"need a list of names: \['rewards'\]"),
        (lambda d: d.get(None, ["x"], 1), TypeError, "consumer: got None"),
        (lambda d: d.get("s", ["x"], 0), ValueError, "n: got 0"),
        (lambda d: d.get("s", ["x"], 1, least=2), ValueError, "least: got 2 rows, need at most 1"),
        (lambda d: d.get("s", ["x"], 1, "in_order"), TypeError, "sampler: got 'in_order', need a"),
        (lambda d: d.get("s", ["x"], 1, lambda r, n: [0.5]), TypeError, "sampler: got float64"),
        (lambda d: d.get("s", ["x"], 1, lambda r, n: [9]), ValueError, "1 positions, 0 of them"),
        (lambda d: d.get("s", ["x"], 1, lambda r, n: [-1]), ValueError, "1 positions, 0 of them"),
        (lambda d: d.get("s", ["x"], 9, timeout_s=float("nan")), ValueError, "timeout_s: got nan"),
        (lambda d: d.get("s", ["x"], 1, timeout_s="1"), TypeError, "timeout_s: got '1'"),
        (lambda d: d.ack(d.get("s", ["x"], 1).batch), TypeError, "lease: got Batch"),
        (lambda d: d.at(node="b"), ValueError, "node: got 'b', need one of"),
        (lambda d: d.lost("b"), ValueError, "node: got 'b', need one of"),
        (lambda d: d.restore({}), TypeError, r"need what dock.snapshot\(\) returned"),
        (lambda d: d.restore({"rows": 1, "stages": 2}), TypeError, "snapshot: got dict, need what"),
        (lambda d: TransferDock(GRPO), TypeError, "transport: got Graph"),
        (lambda d: LocalTransport("ab"), ValueError, "nodes: got 'ab'"),
        (lambda d: LocalTransport(["a", "a"]), ValueError, r"nodes: got \['a', 'a'\]"),
        (lambda d: LocalTransport(3), ValueError, "nodes: got 3"),
        (lambda d: LocalTransport(graph=["s"]), TypeError, r"graph: got \['s'\], need a rk.dock"),
        (lambda d: TransferDock(holder=5), TypeError, "holder: got 5"),
        (lambda d: TransferDock(timeout_s="x"), TypeError, "timeout_s: got 'x'"),
        (lambda d: d.at(holder=5), TypeError, "holder: got 5"),
        (lambda d: d.at(partition=5), TypeError, "partition: got 5"),
        (lambda d: d.drop(5), TypeError, "holder: got 5"),
        (lambda d: d.put({"version": [1]}, [1]), ValueError, "'version', which dock.frame"),
        (lambda d: d.put({"stage:s": [1]}, [1]), ValueError, "'stage:s', which dock.frame"),
        (lambda d: d.get("s", ["x"], 1, lambda r: [0]), TypeError, r"a function of \(rows, n\)"),
        (lambda d: d.get("s", ["x"], 2, samplers.whole_groups), TypeError, "partial binds"),
        (lambda d: d.get("s", ["x"], 3, grouped("2")), TypeError, "group_size: got '2'"),
        (lambda d: d.get("driver", ["x"], 1), ValueError, "consumer: got 'driver', which only"),
        (lambda d: d.put({"x": torch.ones(1).to("meta")}, [1]), TypeError, "x: got a tensor with"),
        (lambda d: d.put({"y": torch.eye(2).to_sparse()}, [1, 2]), TypeError, "need a dense one"),
        (lambda d: d.put({"y": [torch.ones(2), torch.ones(2, 2)]}, [1, 2]), ValueError, "2 shapes"),
        (lambda d: d.get("s", ["x"], 3, pairs), ValueError, "n: got 3 rows, at least 3 of them"),
        (lambda d: d.get("s", ["x"], 1, pairs), ValueError, "whole groups of 2"),
        (lambda d: d.get("s", ["x"], 1, peers=("a", 2)), TypeError, r"peers: got \('a', 2\)"),
        (lambda d: Peers("a", 0, (0,)), ValueError, "size: got 0"),
        (lambda d: Peers("a", 2, 0), TypeError, "call 0, need a name and a tuple"),
        (lambda d: Stage("s", reads="xy"), TypeError, r"reads of 's': got 'xy', need a tuple"),
        (lambda d: Graph((Stage("s"), Stage("s"))), ValueError, "stages: got 's' twice"),
        (lambda d: Graph(("s",)), TypeError, r"stages: got \('s',\)"),
        (lambda d: keep_alive(d, every_s=0).__enter__(), TypeError, "every 0 s, need a dock and"),
        (lambda d: LocalTransport(graph=GRPO, capacity=0), ValueError, "capacity: got 0"),
        (lambda d: LocalTransport(lease_s=0), ValueError, "lease_s: got 0"),
    ],
)
def test_a_wrong_call_says_what_is_needed_and_leaves_nothing_behind(call, error, said):
    dock, _ = make_dock()
    put_numbers(dock, range(3))
    with pytest.raises(error, match=said):
        call(dock)
    dock.drop(dock.holder)
    assert dock.get("s", ["x"], 3).batch["x"].tolist() == [0, 1, 2]


def test_a_row_that_a_stage_acknowledged_without_writing_it_is_named():
    dock, _ = make_dock(graph=FLOW)
    dock.put({"prompt_ids": torch.ones(3, 2)}, range(3))
    lease = dock.get("rollout", ["prompt_ids"], 3)
    dock.put({"response_ids": torch.ones(2, 2)}, [0, 2], stage="rollout")
    dock.ack(lease)
    with pytest.raises(TimeoutError, match="'rollout' writes it, and acknowledged 1 without"):
        dock.get("reference", ["response_ids"], 3)
    dock.put({"response_ids": torch.zeros(1, 2)}, [1])
    assert len(dock.get("reference", ["response_ids"], 3)) == 3


def test_names_that_no_row_has_are_said_and_nothing_else():
    dock, _ = make_dock()
    with pytest.raises(TimeoutError, match=r"No row has \['x'\]; there are \[\]\.$"):
        dock.get("s", ["x"], 1)


def test_text_that_is_no_unicode_is_kept():
    dock, _ = make_dock()
    dock.put({"x": ["\ud800"]}, [0])
    assert dock.fetch([0], ["x"])["x"] == ["\ud800"]


def test_a_cluster_of_one_process_has_a_dock_too():
    with rk.launch(backend="local") as cluster:
        dock = cluster.dock(graph=FLOW, capacity=2, timeout_s=0)
        assert (dock.transport.graph, dock.transport.capacity) == (FLOW, 2)
        assert isinstance(cluster.dock(central=True), CentralDock)
    with pytest.raises(RuntimeError, match="launch a new one"):
        cluster.dock()


def test_no_rows_are_put_as_none():
    dock, _ = make_dock()
    dock.put({"x": torch.zeros(0)}, [])
    put_numbers(dock, range(2))
    dock.put({"x": []}, [])
    assert dock.get("s", ["x"], 2).batch["x"].tolist() == [0, 1]


@pytest.mark.parametrize("where", ["a", "b"])
def test_values_of_another_dtype_are_refused_while_other_rows_have_the_first(where):
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, range(2))
    with pytest.raises(TypeError, match=r"x: got scalar float32 .* need scalar int64, as 2 other"):
        dock.at(node=where).put({"x": torch.ones(2)}, [2, 3])
    with pytest.raises(TypeError, match=r"x: got objects"):
        dock.at(node=where).put({"x": ["a"]}, [0])
    assert dock.get("s", ["x"], 2).batch["x"].dtype == torch.int64
    assert sum(r.value["rows"] for r in stats(dock).values()) == 2
    dock.put({"x": torch.ones(2)}, [0, 1])  # all of them
    assert dock.fetch([0, 1], ["x"])["x"].dtype == torch.float32


@pytest.mark.parametrize("where", ["a", "b"])
def test_values_of_another_dtype_that_are_refused_cost_none_of_the_old(where):
    dock, _ = make_dock(("a", "b"))
    put_numbers(dock, range(2))
    put_numbers(dock.at(node="b"), range(2, 4))
    with pytest.raises(TypeError, match=r"x: got scalar float32 .* need scalar int64, as 2 other"):
        dock.at(node=where).put({"x": torch.ones(2)}, [0, 1])
    assert dock.fetch(range(4), ["x"])["x"].tolist() == [0, 1, 2, 3]
    dock.put({"x": torch.ones(4)}, range(4))  # all of them, on both nodes
    assert dock.fetch(range(4), ["x"])["x"].tolist() == [1.0] * 4
    assert [r.value["rows"] for r in stats(dock).values()] == [4, 0]


def test_rows_that_nobody_put_are_not_blamed_on_a_stage():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    with pytest.raises(TimeoutError, match=r"Nobody has put rows 7\.$"):
        dock.fetch([0, 7], ["x"])


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    with pytest.raises(TimeoutError, match=r"Did you mean 'rewards'\?"):
        dock.get("train", ["x", "reward"], 2)


def test_a_stage_that_itself_waits_for_a_stage_left_out_is_not_to_blame():
    dock, _ = make_dock(graph=GRPO)
    dock.put({"prompt_ids": torch.ones(2, 2)}, [0, 1])
    dock.put({"response_ids": torch.ones(2, 2)}, [0, 1], stage="rollout")
    with pytest.raises(TimeoutError, match=r"It needs 'rewards' of stage 'score', which no row"):
        dock.get("train", ["response_ids", "advantages"], 2)


def test_a_lease_that_was_acknowledged_is_not_given_back():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    lease = dock.get("train", ["x"], 2)
    dock.ack(lease)
    with pytest.raises(StaleLeaseError, match="which was acknowledged"):
        dock.nack(lease)


def test_rows_granted_to_an_interrupted_get_are_offered_again():
    dock, _ = make_dock()
    put_numbers(dock, range(2))
    controllers = dock.transport.controllers

    def interrupted(method, calls, **options):
        found = controllers(method, calls, **options)
        if method == "get":
            raise KeyboardInterrupt
        return found

    dock.transport.controllers = interrupted
    with pytest.raises(KeyboardInterrupt):
        dock.get("train", ["x"], 2)
    dock.transport.controllers = controllers
    assert len(dock.at(holder="other").get("train", ["x"], 2)) == 2


@pytest.mark.parametrize("how", ["interrupted", "timed out"])
def test_a_put_that_was_given_up_keeps_no_room(how, monkeypatch):
    two = Graph((Stage("a", reads=("x",)), Stage("b", reads=("x",))))
    dock, _ = make_dock(graph=two, capacity=1)
    if how == "interrupted":
        call = dock.transport.controllers

        def interrupted(method, calls, **options):
            found = call(method, calls, **options)
            if method == "admit":
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(dock.transport, "controllers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put_numbers(dock, [1])
        monkeypatch.undo()
    else:
        put_numbers(dock, [0])
        dock.ack(dock.get("a", ["x"], 1))  # there is room at a, and none at b
        with pytest.raises(TimeoutError, match="wait for stage 'b'"):
            put_numbers(dock, [1])
        dock.ack(dock.get("b", ["x"], 1))
    put_numbers(dock, [2])
    assert dock.get("a", ["x"], 1).uids.tolist() == [2]


def test_an_interrupted_get_that_still_waits_gets_nothing():
    controller = make_dock()[0].transport._controllers["driver"]
    controller.withdraw("asked-1")
    asked = Request(columns=(), n=1, least=1, holder="h", sampler=samplers.in_order, id="asked-1")
    assert controller.get(asked, timeout_s=30).waited_s < 30
