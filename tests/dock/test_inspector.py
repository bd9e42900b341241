"""What a dock shows of itself: little, soon, and never an error."""

import pickle
import threading
import time

import numpy as np
import pytest
import torch

from rlkit.dock import GRPO, LocalTransport, TransferDock
from rlkit.dock.inspector import Inspector
from rlkit.dock.messages import ClosedError


def make_dock(num_rows, **options):
    dock = TransferDock(LocalTransport(("a", "b"), **options), holder="actor/0", timeout_s=0)
    if num_rows:
        uids = np.arange(num_rows)[::-1]
        dock.put({"x": torch.zeros(num_rows)}, uids, policy_version=uids // 100)
    return dock


def test_a_look_has_the_first_rows_by_uid_as_the_frame_has_them():
    dock = make_dock(30, graph=GRPO)
    dock.at(node="b").put({"y": torch.zeros(2)}, [3, 1])
    dock.ack(dock.get("train", ["y"], 1))
    dock.get("train", ["y"], 1)
    look = dock.look(limit=20)
    assert look.frame.equals(dock.frame().head(20))
    assert look.num_rows == 30


def test_counts_of_a_look_are_of_all_rows():
    dock = make_dock(250)
    dock.ack(dock.get("train", ["x"], 100))
    dock.get("train", ["x"], 20)
    dock.at(holder="actor/1").get("train", ["x"], 30)
    look = dock.look()
    assert look.stages == (
        {"stage": "train", "waiting": 100, "leased": 50, "consumed": 100,
         "leased by": "actor/1 (30), actor/0 (20)"},
    )  # fmt: skip
    assert [(each["version"], each["rows"]) for each in look.versions] == [
        (0, 100),
        (1, 100),
        (2, 50),
    ]
    assert look.nodes == ({"node": "a", "bytes": "1,000"},)


@pytest.mark.parametrize("draw", [repr, TransferDock._repr_html_])
def test_a_dock_shows_ten_rows_and_how_many_there_are(draw):
    text = draw(make_dock(8192))
    assert "8192 rows, 32,768 bytes on 2 nodes" in text
    assert "and 8182 more" in text
    assert len(text) < 5000


def test_bytes_by_node_are_in_the_frame():
    dock = make_dock(3)
    dock.at(node="b").put({"y": torch.zeros(1, dtype=torch.float64)}, [2])
    frame = dock.frame()
    assert frame["bytes:a"].tolist() == [4, 4, 4]
    assert frame["bytes:b"].tolist() == [0, 0, 8]
    assert frame["bytes"].tolist() == [4, 4, 12]


def test_a_controllers_answer_does_not_grow_with_its_rows():
    sizes = []
    for num_rows in (100, 10_000):
        dock = make_dock(0)
        dock.put({"x": torch.zeros(num_rows)}, range(num_rows))
        dock.get("train", ["x"], num_rows // 2)
        views = dock.transport.controllers("view", {"driver": (10,), "train": (10,)})
        sizes.append(len(pickle.dumps([reply.value for reply in views.values()])))
    assert sizes[1] < 1.1 * sizes[0]


def test_names_from_outside_are_escaped():
    dock = make_dock(2).at(holder="<script>")
    dock.put({"<i>": [1, 2]}, [0, 1])
    dock.get("<u>", ["x"], 1)
    drawn = dock._repr_html_()
    assert "&lt;script&gt;" in drawn
    assert not any(tag in drawn for tag in ("<script>", "<i>", "<u>"))


def hang(monkeypatch, dock):
    """Controllers that do not answer until the event is set."""
    free, real = threading.Event(), dock.transport.controllers

    def slow(*args, **options):
        free.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(dock.transport, "controllers", slow)
    return free


def test_controllers_that_do_not_answer_leave_the_last_look_with_its_age(monkeypatch):
    dock = make_dock(3)
    dock.look()
    free = hang(monkeypatch, dock)
    start = time.monotonic()
    look = dock.look(timeout_s=0.1)
    assert time.monotonic() - start < 30
    assert "no answer of the controllers within 0.1 s. This is the look of 0 s ago" in look.note
    assert look.num_rows == 3
    for text in (repr(look), look._repr_html_()):
        assert "no answer of the controllers" in text
    free.set()


def test_without_a_last_look_nothing_is_known(monkeypatch):
    dock = make_dock(3)
    free = hang(monkeypatch, dock)
    look = dock.look(timeout_s=0.01)
    assert "Nothing is known of the rows" in look._repr_html_()
    assert "TransferDock(no answer)" in repr(look)
    free.set()


def test_controllers_that_hang_are_asked_once_and_an_answer_that_comes_late_counts(monkeypatch):
    dock = make_dock(3)
    free = hang(monkeypatch, dock)
    asking = {thread for thread in threading.enumerate() if "look at" in thread.name}
    for _ in range(5):
        dock.look(timeout_s=0.01)
    new = {t for t in threading.enumerate() if "look at" in t.name} - asking
    assert len(new) == 1
    free.set()
    new.pop().join(60)
    free.clear()
    assert dock.look(timeout_s=0.01).num_rows == 3
    free.set()


@pytest.mark.parametrize(("error", "gone"), [(KeyError("x"), False), (ClosedError("shut"), True)])
def test_an_error_of_the_controllers_is_shown_and_not_raised(monkeypatch, error, gone):
    dock = make_dock(3)
    dock.look()

    def fail(*args, **options):
        raise error

    monkeypatch.setattr(dock.transport, "controllers", fail)
    look = dock.look()
    assert look.gone == gone
    assert type(error).__name__ in repr(dock)
    assert type(error).__name__ in dock._repr_html_()


def test_a_thread_that_cannot_be_had_is_said(monkeypatch):
    dock = make_dock(3)

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert "can't start new thread" in repr(dock)


def test_an_inspector_that_travels_has_seen_nothing():
    found = pickle.loads(pickle.dumps(Inspector()))
    assert found._last is None
