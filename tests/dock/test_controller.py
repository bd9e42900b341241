from dataclasses import replace

import numpy as np

from rlkit.batch.rows import Rows
from rlkit.dock import LocalTransport, TransferDock
from rlkit.dock.arrivals import Retired
from rlkit.dock.controller import Controller
from rlkit.dock.messages import Facts, Notice, Request
from rlkit.dock.rowtable import EMPTY
from rlkit.dock.samplers import in_order


def notice(node, stamp, uids=(0, 1), length=2):
    """A write of one column."""
    facts = Facts("ragged", "int64", np.full(len(uids), 8 * length), np.full(len(uids), length))
    return Notice(
        node=node, stage="reference", uids=np.asarray(uids), columns={"x": facts}, stamp=stamp
    )


def test_controllers_agree_on_the_later_of_two_writes_in_whatever_order_they_hear_of_them():
    early, late = notice("a", 1), notice("b", 2)
    for order in ((early, late), (late, early)):
        controller = Controller("train")
        moved = [controller.notice(write)[1] for write in order]
        assert moved[0] == {}
        assert moved[1]["a"]["x"].tolist() == [0, 1]
        places = controller.where(np.asarray([0, 1]), ["x"], timeout_s=0)
        assert list(places.by_node()) == ["b"]


def test_a_stale_copy_is_freed_and_a_newer_one_beside_it_is_not():
    dock = TransferDock(LocalTransport(("a", "b")), timeout_s=0)
    dock.put({"x": Rows([1])}, [0])
    dock.at(node="b").put({"x": Rows([2])}, [0])
    dock.put({"x": Rows([3])}, [0])
    (write,) = dock.transport.warehouses("index", {"a": ("s",)})["a"].value
    dock.transport.warehouses("free", {"a": (np.asarray([0]), ["x"])}, before=write.stamp)
    assert dock.fetch([0], ["x"])["x"] == [3]


def test_rows_keep_their_order_of_arrival_and_are_found_by_any_uid():
    controller = Controller("train")
    for uids in ([5, 900, 2], [7], list(range(100, 300)), [1]):
        controller.notice(notice("a", 1, uids))
    controller.forget(np.asarray([900, 150]))
    table = controller.view().table
    arrived = [5, 2, 7, *[u for u in range(100, 300) if u != 150], 1]
    assert table["uid"].tolist() == sorted(arrived)
    asked = Request(columns=("x",), n=300, least=1, holder="h", sampler=in_order)
    assert controller.get(asked, timeout_s=0).places.uids.tolist() == arrived
    at, there = table.find(np.asarray([1, 900, 299, 6]))
    assert there.tolist() == [True, False, True, False]
    assert table["uid"][at[there]].tolist() == [1, 299]
    assert controller.notice(notice("a", 2, [900, 901]))[0].tolist() == [900]


def test_writes_that_wait_to_be_entered_together_are_as_if_entered_one_by_one():
    together, apart = Controller("train"), Controller("train")
    writes = [
        notice("a", 1, range(4)),
        notice("b", 2, range(4, 6), length=3),
        replace(notice("b", 3, [6, 7]), group_ids=np.asarray([3, 3]), versions=np.asarray([1, 2])),
        replace(notice("a", 4, [8]), stage="rollout", partition="eval"),
        notice("a", 5, [9, 4]),
    ]
    for write in writes:
        together.notice(write)
        apart.notice(write)
        apart.view()
    one, other = together.view().table, apart.view().table
    assert one.writers == other.writers
    assert one.nodes == other.nodes
    for fact in ("uid", "group", "version", "partition", *((f, "x") for f in EMPTY)):
        assert one[fact].tolist() == other[fact].tolist(), fact


def test_a_restored_controller_takes_a_known_row_for_known():
    controller = Controller("train")
    controller.restore([notice("a", 1)], {"leases": {}, "last": 0, "retired": [7]}, leased=True)
    assert controller.notice(notice("a", 2))[0].tolist() == []
    assert controller.notice(notice("a", 3, [7]))[0].tolist() == [7]
    assert controller.view().num_rows == 2


def test_a_request_that_is_sent_again_gets_the_lease_whose_answer_died_with_the_controller():
    ledger = {}
    first, second = (Controller("train", commit=ledger.__setitem__) for _ in range(2))
    first.notice(notice("a", 1, range(4)))
    asked = Request(columns=("x",), n=2, least=2, holder="h", sampler=in_order, id="asked-1")
    lost = first.get(asked, timeout_s=0)
    second.restore([notice("a", 1, range(4))], {"leases": ledger, "last": lost.token}, leased=True)
    assert second.get(asked, timeout_s=0).token == lost.token
    other = second.get(replace(asked, id="asked-2"), timeout_s=0)
    assert other.places.uids.tolist() == [2, 3]


def test_retired_rows_are_known_however_many_came_after():
    retired = Retired([3, 1])
    retired.add(np.arange(10_000, 30_000))
    retired.add(np.asarray([5]))
    assert retired.among(np.asarray([1, 2, 3, 5, 29_999, 30_000])).tolist() == [
        True, False, True, True, True, False,
    ]  # fmt: skip
    assert len(retired) == len(retired.tolist()) == 20_003
