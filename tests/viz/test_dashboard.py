import base64
import gc
import io
import logging
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import IPython
import pytest
from IPython.core.events import EventManager

from rlkit.metrics import MetricLog
from rlkit.viz import Dashboard
from rlkit.viz.live import call_in_thread


class BrokenLog(MetricLog):
    """A log whose frame cannot be had while `broken`."""

    broken = False

    def frame(self):
        if self.broken:
            raise RuntimeError("no <frame> today")
        return super().frame()


@pytest.fixture
def show(timeline, in_notebook):
    """Make a dashboard on the test's time."""

    def make(log, **options):
        return Dashboard(log, clock=timeline.clock, call_later=timeline.call_later, **options)

    return make


def count_updates(dashboard):
    updates = []
    dashboard.widget.observe(updates.append, "value")
    return updates


def add_rows(log, num_rows, timeline, *, every_s=0.0):
    for step in range(num_rows):
        log.add(step, reward=step / 100)
        timeline.advance(every_s)


def test_new_row_reaches_the_widget(show, timeline):
    log = MetricLog()
    dashboard = show(log)
    log.add(7, reward=0.25)
    timeline.advance(0.5)
    assert ">7<" in dashboard.widget.value
    assert ">0.25<" in dashboard.widget.value


def test_log_that_has_rows_is_shown_at_once(show):
    log = MetricLog()
    log.add(7, reward=0.25)
    assert ">7<" in show(log).widget.value


def test_ten_thousand_rows_in_a_second_make_two_updates(show, timeline):
    log = MetricLog()
    updates = count_updates(show(log))
    add_rows(log, 10_000, timeline, every_s=1e-4)
    assert len(updates) <= 2


def test_last_row_is_drawn_after_a_flood_without_close(show, timeline):
    log = MetricLog()
    dashboard = show(log)
    add_rows(log, 10_000, timeline, every_s=1e-4)
    timeline.advance(0.5)
    assert ">9999<" in dashboard.widget.value


def test_page_stays_small_in_a_flood(show, timeline):
    log = MetricLog()
    dashboard = show(log)
    add_rows(log, 10_000, timeline, every_s=1e-4)
    timeline.advance(0.5)
    assert len(dashboard.widget.value) < 30_000


def test_at_most_one_drawing_is_planned(show, timeline):
    log = MetricLog()
    show(log)
    add_rows(log, 100, timeline)
    assert len(timeline.planned) == 1


def test_nothing_is_drawn_while_nothing_happens(show, timeline):
    log = MetricLog()
    dashboard = show(log)
    log.add(0, reward=0.5)
    timeline.advance(0.5)
    updates = count_updates(dashboard)
    timeline.advance(60.0)
    assert not updates
    assert not timeline.planned


def test_row_that_comes_while_drawing_is_drawn_next(show, timeline):
    class BusyLog(MetricLog):
        late = 1

        def frame(self):
            frame = super().frame()
            if len(self) == 1 and self.late:
                self.late = 0
                self.add(1, reward=0.5)
            return frame

    log = BusyLog()
    dashboard = show(log)
    log.add(0, reward=0.5)
    timeline.advance(0.5)
    assert ">0<" in dashboard.widget.value
    timeline.advance(0.5)
    assert ">1<" in dashboard.widget.value


def test_slow_drawing_takes_at_most_a_twentieth_of_the_time(show, timeline):
    class SlowLog(MetricLog):
        def frame(self):
            timeline.now_s += 0.2
            return super().frame()

    log = SlowLog()
    updates = count_updates(show(log))
    add_rows(log, 400, timeline, every_s=0.1)  # 40 s: 4 s between drawings
    assert 8 <= len(updates) <= 10


def test_adding_draws_nothing_itself(show, timeline):
    log = BrokenLog()
    show(log)
    timeline.advance(10.0)
    log.broken = True
    log.add(0, reward=0.5)  # would raise, were the frame asked for here


def test_close_draws_what_was_not_drawn(show):
    log = MetricLog()
    dashboard = show(log)
    log.add(7, reward=0.25)
    dashboard.close()
    assert ">7<" in dashboard.widget.value


def test_leaving_a_with_block_closes(show):
    log = MetricLog()
    with show(log) as dashboard:
        log.add(7, reward=0.25)
    assert ">7<" in dashboard.widget.value


def test_closed_dashboard_follows_no_more(show, timeline):
    log = MetricLog()
    dashboard = show(log)
    log.add(7, reward=0.25)
    dashboard.close()
    log.add(8, reward=0.5)
    timeline.advance(10.0)
    dashboard.close()
    assert ">8<" not in dashboard.widget.value
    assert not timeline.planned


def test_closed_dashboard_is_let_go_by_its_log(show):
    log = MetricLog()
    dashboard = weakref.ref(show(log))
    dashboard().close()
    gc.collect()
    assert dashboard() is None


def test_drawing_errors_stay_out_of_the_training(show, timeline):
    log = BrokenLog()
    show(log)
    log.broken = True
    add_rows(log, 10, timeline, every_s=1.0)
    assert len(log) == 10


def test_drawing_errors_are_logged_once(show, timeline, caplog):
    log = BrokenLog()
    show(log)
    log.broken = True
    add_rows(log, 10, timeline, every_s=1.0)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rlkit.viz", logging.WARNING)
    assert "no <frame> today" in record.getMessage()
    assert record.exc_info


def test_drawing_errors_are_shown_in_the_widget_escaped(show, timeline):
    log = BrokenLog()
    dashboard = show(log)
    log.broken = True
    add_rows(log, 1, timeline, every_s=1.0)
    assert "RuntimeError: no &lt;frame&gt; today" in dashboard.widget.value


def test_dashboard_recovers_from_an_error(show, timeline):
    log = BrokenLog()
    dashboard = show(log)
    log.broken = True
    add_rows(log, 1, timeline, every_s=1.0)
    log.broken = False
    add_rows(log, 3, timeline, every_s=1.0)
    assert "RuntimeError" not in dashboard.widget.value
    assert ">2<" in dashboard.widget.value


def test_no_thread_to_be_had_is_reported_not_raised(in_notebook, caplog):
    def no_thread(delay_s, function):
        raise RuntimeError("can't start new thread")

    log = MetricLog()
    Dashboard(log, call_later=no_thread)
    log.add(0, reward=0.5)
    assert "can't start new thread" in caplog.text


def test_notebook_shows_the_widget(show):
    bundle = show(MetricLog())._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"].startswith("Dashboard(live")


@pytest.fixture
def outputs(monkeypatch):
    """Outputs by display id, as a notebook keeps them."""
    found = {}

    def display(data, *, raw, display_id):
        assert raw
        found[display_id] = data

    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr("IPython.display.update_display", display)
    return found


@pytest.fixture
def cells(monkeypatch, show):
    """The events of a shell."""
    events = EventManager(None, {"post_run_cell": lambda result: None})
    shell = SimpleNamespace(kernel=object(), events=events)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    return events


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_close_leaves_the_last_state_in_the_output_and_no_widget(show, outputs):
    log = MetricLog()
    dashboard = show(log)
    dashboard._ipython_display_()
    (output,) = outputs.values()
    assert WIDGET in output
    log.add(7, reward=0.25)
    dashboard.close()
    (output,) = outputs.values()
    assert WIDGET not in output
    assert ">7<" in output["text/html"]
    assert output["text/plain"].startswith("Dashboard(closed: step 7")
    assert base64.b64decode(output["image/png"]).startswith(b"\x89PNG")


def test_a_dashboard_that_closed_is_shown_without_a_widget(show, outputs):
    dashboard = show(MetricLog())
    dashboard.close()
    assert not outputs
    dashboard._ipython_display_()
    (output,) = outputs.values()
    assert set(output) == {"text/plain", "text/html"}


def test_the_output_is_brought_up_to_date_when_a_cell_ends(show, outputs, cells):
    log = MetricLog()
    dashboard = show(log)
    for _ in range(2):  # shown twice
        dashboard._ipython_display_()
    log.add(7, reward=0.25)
    cells.trigger("post_run_cell", None)
    (output,) = outputs.values()
    assert ">7<" in output["text/html"]
    assert WIDGET in output
    outputs.clear()
    cells.trigger("post_run_cell", None)
    assert not outputs  # nothing is new
    dashboard.close()
    assert dashboard._on_cell_end not in cells.callbacks["post_run_cell"]


def test_an_output_that_cannot_be_replaced_stays_out_of_the_training(show, outputs, monkeypatch):
    def gone(*args, **options):
        raise RuntimeError("no connection")

    monkeypatch.setattr("IPython.display.update_display", gone)
    dashboard = show(MetricLog())
    dashboard._ipython_display_()
    dashboard.close()


def test_without_a_widget_ipython_shows_the_text(terminal):
    with pytest.raises(NotImplementedError):
        Dashboard(MetricLog(), stream=terminal)._ipython_display_()


def test_repr_asks_the_log_for_nothing(show):
    log = BrokenLog()
    dashboard = show(log)
    log.broken = True
    assert repr(dashboard) == "Dashboard(live: waiting for the first step)"


def test_total_steps_make_a_progress_bar(show):
    log = MetricLog()
    log.add(24, reward=0.5)
    assert 'aria-valuenow="25"' in show(log, total_steps=100).widget.value


def test_pace_is_taken_from_the_rows_where_no_step_time_is_logged(timeline, terminal):
    class PlainLog(MetricLog):
        def frame(self):
            return super().frame()[["step"]]

    log = PlainLog()
    dashboard = Dashboard(
        log, stream=terminal, clock=timeline.clock, call_later=timeline.call_later
    )
    add_rows(log, 10, timeline, every_s=2.0)
    dashboard.close()
    assert "2 s/step" in terminal.getvalue()


def test_terminal_line_is_written_over_itself(timeline, terminal):
    log = MetricLog()
    dashboard = Dashboard(
        log, stream=terminal, clock=timeline.clock, call_later=timeline.call_later
    )
    add_rows(log, 3, timeline, every_s=1.0)
    dashboard.close()
    text = terminal.getvalue()
    assert text.count("\r") == 4
    assert text.count("\n") == 1
    assert text.rsplit("\r", 1)[-1].startswith("step 2 | reward 0.020")


def test_shorter_terminal_line_wipes_the_longer_one(timeline, terminal):
    log = MetricLog()
    Dashboard(log, stream=terminal, clock=timeline.clock, call_later=timeline.call_later)
    log.add(0, {"throughput/tokens_per_s": 123_456.0, "time/step_s": 1.0})
    timeline.advance(1.0)
    log.add(1, {"throughput/tokens_per_s": 7.0, "time/step_s": 1.0})
    timeline.advance(1.0)
    first, second = terminal.getvalue().split("\r")[1:]
    assert len(second) == len(first)
    assert len(second.rstrip()) < len(first.rstrip())


def test_terminal_line_fits_the_terminal(timeline, terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    log = MetricLog()
    Dashboard(log, stream=terminal, clock=timeline.clock, call_later=timeline.call_later)
    add_rows(log, 1, timeline, every_s=1.0)
    assert len(terminal.getvalue().strip("\r")) == 19


def test_log_file_gets_a_line_every_five_seconds(timeline):
    stream, log = io.StringIO(), MetricLog()
    Dashboard(log, stream=stream, clock=timeline.clock, call_later=timeline.call_later)
    add_rows(log, 200, timeline, every_s=0.1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert "\r" not in stream.getvalue()


def test_log_file_gets_the_last_row_once(timeline):
    stream, log = io.StringIO(), MetricLog()
    dashboard = Dashboard(log, stream=stream, clock=timeline.clock, call_later=timeline.call_later)
    add_rows(log, 3, timeline)
    timeline.advance(5.0)
    dashboard.close()
    dashboard.close()
    assert [line.split(" |")[0] for line in stream.getvalue().splitlines()] == ["step 2"]


def test_broken_stream_stays_out_of_the_training(timeline, caplog):
    stream, log = io.StringIO(), MetricLog()
    dashboard = Dashboard(log, stream=stream, clock=timeline.clock, call_later=timeline.call_later)
    stream.close()
    log.add(0, reward=0.5)
    dashboard.close()
    assert "ValueError: I/O operation on closed file" in caplog.text


def test_outside_a_notebook_there_is_no_widget(terminal):
    assert Dashboard(MetricLog(), stream=terminal).widget is None
    assert Dashboard(MetricLog()).widget is None


def test_ipywidgets_are_optional(in_notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    dashboard = Dashboard(MetricLog())
    assert dashboard.widget is None
    assert list(dashboard._repr_mimebundle_()) == ["text/plain"]


def test_rows_added_by_threads_all_arrive(in_notebook):
    log = MetricLog()
    dashboard = Dashboard(log, interval_s=0.1)
    updates = count_updates(dashboard)
    start_s = time.monotonic()
    threads = [
        threading.Thread(target=lambda: [log.add(step, reward=1.0) for step in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dashboard.close()
    elapsed_s = time.monotonic() - start_s
    assert len(log) == 2000
    assert len(updates) <= elapsed_s / 0.1 + 2
    assert ">1999</text>" in dashboard.widget.value


def test_drawing_thread_does_not_keep_the_process_alive():
    timer = call_in_thread(60.0, print)
    timer.cancel()
    assert timer.daemon


def test_process_ends_and_prints_the_last_row_without_close():
    code = (
        "from rlkit.metrics import MetricLog\n"
        "from rlkit.viz import Dashboard\n"
        "log = MetricLog()\n"
        "Dashboard(log)\n"
        "for step in range(50): log.add(step, reward=0.5)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"MPLBACKEND": "Agg", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert done.stderr.startswith("step 49 | reward 0.500")


def test_frame_in_place_of_a_log_is_a_type_error(frame):
    with pytest.raises(TypeError, match=r"Pass the rlkit\.MetricLog itself, not its frame"):
        Dashboard(frame)


@pytest.mark.parametrize("total_steps", [0, -1, 2.5, "100"])
def test_total_steps_must_be_a_whole_number(total_steps):
    with pytest.raises((TypeError, ValueError), match="total_steps: got"):
        Dashboard(MetricLog(), total_steps=total_steps)


@pytest.mark.parametrize("interval_s", [0, 0.01, float("nan")])
def test_interval_has_a_floor(interval_s):
    with pytest.raises(ValueError, match=r"interval_s: got .*, need 0\.1 s or more"):
        Dashboard(MetricLog(), interval_s=interval_s)
