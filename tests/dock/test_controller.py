import numpy as np

from rlkit.dock import LocalTransport, TransferDock
from rlkit.dock.controller import Controller
from rlkit.dock.messages import Facts, Notice, Request
from rlkit.dock.samplers import in_order
from rlkit.rows import Rows


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
