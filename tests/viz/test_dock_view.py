"""The live view of a dock: when it draws, what it shows, and that it never gets in the way."""

import gc
import logging
import threading
import time
import weakref

import pytest
import torch

from rlkit.dock import LocalTransport, TransferDock
from rlkit.dock.messages import ClosedError
from rlkit.viz import DockView
from rlkit.viz.dock_view import MAX_ROWS, value_html


@pytest.fixture
def show(timeline, in_notebook):
    """Make a view on the test's time."""

    def make(dock, **options):
        return DockView(dock, clock=timeline.clock, call_later=timeline.call_later, **options)

    return make


@pytest.fixture
def dock():
    dock = TransferDock(LocalTransport(), holder="actor/0", timeout_s=0)
    dock.put({"prompt": ["<b>7</b>", "8", "9"], "rewards": torch.tensor([0.5, 1, 0])}, [7, 8, 9])
    return dock


class BrokenDock(TransferDock):
    """A dock that cannot be looked at while `broken`."""

    broken = False

    def look(self, **options):
        if self.broken:
            raise RuntimeError("no <look> today")
        return super().look(**options)


def test_a_dock_is_shown_at_once(show, dock):
    assert "TransferDock(3 rows" in show(dock).table.value


def test_what_happens_is_shown_within_the_interval(show, dock, timeline):
    view = show(dock)
    dock.get("train", ["rewards"], 2)
    timeline.advance(0.5)
    assert "leased by actor/0" in view.table.value


def test_at_most_four_drawings_a_second(show, dock, timeline):
    view = show(dock, interval_s=0.25)
    drawn = []
    view.table.observe(drawn.append, "value")
    for uid in range(100, 140):
        dock.put({"rewards": torch.zeros(1)}, [uid])
        timeline.advance(0.05)  # 2 s in all
    assert 7 <= len(drawn) <= 8


def test_a_dock_that_answers_slowly_is_asked_less_often(show, timeline):
    class SlowDock(TransferDock):
        looks = 0

        def look(self, **options):
            self.looks += 1
            timeline.now_s += 1.0
            return super().look(**options)

    dock = SlowDock()
    view = show(dock)
    timeline.advance(50)
    view.close()
    assert 10 <= dock.looks <= 12  # a fifth of the time


def test_one_drawing_is_planned_at_a_time_whatever_is_chosen(show, dock, timeline):
    view = show(dock)
    for uid in (7, 8, 9):
        view.rows.value = uid
        assert len([p for p in timeline.planned if not p.cancelled]) == 1
    timeline.advance(5)
    assert len([p for p in timeline.planned if not p.cancelled]) == 1


def test_a_chosen_row_shows_its_values_escaped(show, dock, timeline):
    dock.put({"response_ids": [torch.tensor([5, 6])]}, [7])
    dock.put({"half": [torch.ones(1, dtype=torch.bfloat16)]}, [7])
    view = show(dock)
    assert view.sample.value == ""
    view.rows.value = 7
    timeline.advance(0)
    assert "row 7" in view.sample.value
    for text in ("&lt;b&gt;7&lt;/b&gt;", ">0.5<", ">5<", ">6<"):
        assert text in view.sample.value
    assert "<b>7</b>" not in view.sample.value


def test_an_overwritten_value_of_the_chosen_row_is_shown(show, dock, timeline):
    view = show(dock)
    view.rows.value = 9
    timeline.advance(0)
    dock.put({"rewards": torch.tensor([0.25])}, [9])
    timeline.advance(0.5)
    assert ">0.25<" in view.sample.value


def test_a_choice_outlives_new_rows_and_says_when_its_row_is_gone(show, dock, timeline):
    view = show(dock)
    view.rows.value = 8
    dock.put({"rewards": torch.zeros(2)}, [1, 2])
    timeline.advance(0.5)
    assert view.rows.value == 8
    assert "row 8" in view.sample.value
    dock.clear([8])
    timeline.advance(0.5)
    assert view.rows.value == 8
    assert "row 8 is not among the first" in view.sample.value


def test_the_first_200_rows_may_be_chosen(show):
    dock = TransferDock()
    dock.put({"rewards": torch.zeros(300)}, range(300))
    options = show(dock).rows.options
    assert len(options) == 1 + MAX_ROWS
    assert options[-1] == ("199", 199)


def test_long_values_are_cut():
    assert value_html(torch.arange(10_000)).endswith("… 10000 in all")
    assert len(value_html("x" * 10**6)) < 3000
    assert value_html([["a", 1.0], {"k": "<"}]).count("&lt;") == 1


def test_errors_are_logged_once_shown_escaped_and_not_raised(show, timeline, caplog):
    dock = BrokenDock()
    view = show(dock)
    dock.broken = True
    timeline.advance(5)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rlkit.viz", logging.WARNING)
    assert record.exc_info
    assert "RuntimeError: no &lt;look&gt; today" in view.sample.value
    dock.broken = False
    timeline.advance(5)
    assert view.sample.value == ""


def test_a_view_ends_with_close_and_shows_the_last_state(show, dock, timeline):
    view = show(dock)
    dock.put({"rewards": torch.zeros(1)}, [42])
    view.close()
    view.close()
    assert ">42<" in view.table.value
    assert not [p for p in timeline.planned if not p.cancelled]
    view.rows.value = 7
    assert not [p for p in timeline.planned if not p.cancelled]
    assert set(view._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_leaving_a_with_block_closes(show, dock, timeline):
    with show(dock):
        pass
    assert not [p for p in timeline.planned if not p.cancelled]


def test_a_view_that_nobody_names_ends(show, dock, timeline):
    view = weakref.ref(show(dock))
    gc.collect()
    assert view() is None
    timeline.advance(5)
    assert not timeline.planned


def test_a_view_keeps_no_dock_alive_and_ends_with_it(show, timeline):
    dock = TransferDock()
    view, gone = show(dock), weakref.ref(dock)
    del dock
    gc.collect()
    assert gone() is None
    timeline.advance(5)
    assert not timeline.planned
    assert repr(view) == "DockView(the dock is gone)"


def test_a_view_of_a_closed_dock_says_so_and_ends(show, dock, timeline, monkeypatch):
    view = show(dock)

    def closed(*args, **options):
        raise ClosedError("dock: view came after <the end>")

    monkeypatch.setattr(dock.transport, "controllers", closed)
    timeline.advance(5)
    assert "view came after &lt;the end&gt;. This is the look of" in view.table.value
    assert not timeline.planned


def test_no_thread_to_be_had_is_reported_not_raised(in_notebook, dock, caplog):
    def no_thread(delay_s, function):
        raise RuntimeError("can't start new thread")

    DockView(dock, call_later=no_thread)
    assert "can't start new thread" in caplog.text


def test_a_drawing_that_hangs_holds_up_neither_choice_nor_close(in_notebook, dock, monkeypatch):
    free, waits = threading.Event(), threading.Event()
    view = DockView(dock, interval_s=0.25)

    def hang(*args, **options):
        waits.set()
        free.wait(60)
        raise TimeoutError("late")

    monkeypatch.setattr(dock, "fetch", hang)
    view.rows.value = 7
    assert waits.wait(60)
    start = time.monotonic()
    view.rows.value = 8
    view.close()
    assert time.monotonic() - start < 30  # it waits a second; machines are slow
    free.set()


def test_threads_are_daemons_and_end(in_notebook, dock):
    before = set(threading.enumerate())
    view = DockView(dock, interval_s=0.25)
    new = set(threading.enumerate()) - before
    assert new
    assert all(thread.daemon for thread in new)
    view.close()
    for thread in new:
        thread.join(60)
        assert not thread.is_alive()


def test_outside_a_notebook_the_table_is_text(dock):
    view = DockView(dock)
    assert view.widget is None
    text = view._repr_mimebundle_()["text/plain"]
    assert "TransferDock(3 rows" in text
    assert "rewards" in text
    view.close()


def test_the_notebook_shows_the_widget(show, dock):
    bundle = show(dock)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "TransferDock(3 rows" in bundle["text/html"]


def test_a_frame_in_place_of_a_dock_is_a_type_error(dock):
    with pytest.raises(TypeError, match=r"Pass the rk\.TransferDock itself, not its frame"):
        DockView(dock.frame())


@pytest.mark.parametrize("interval_s", [0, 0.2, float("nan")])
def test_interval_has_a_floor(dock, interval_s):
    with pytest.raises(ValueError, match=r"interval_s: got .*, need 0\.25 s or more"):
        DockView(dock, interval_s=interval_s)
