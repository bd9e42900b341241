"""A live view of a run: one widget in a notebook, one updating line in a terminal."""

from __future__ import annotations

import atexit
import shutil
import sys
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TextIO

import pandas as pd

from rlkit.checks import whole
from rlkit.viz.kernel import after_cells, html_widget, picture
from rlkit.viz.live import CallLater, Live, call_in_thread
from rlkit.viz.page import page_html
from rlkit.viz.summary import Summary, summarise, terminal_line

LOG_LINE_INTERVAL_S = 5.0  # where a line cannot be overwritten, few of them
MAX_DRAW_SHARE = 0.05  # of the time at most; a slower drawing is done less often

_open_dashboards: weakref.WeakSet[Dashboard] = weakref.WeakSet()


class Log(Protocol):
    """What a dashboard asks of a log."""

    def listen(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call back after each added row; returns the function that ends it."""
        ...

    def frame(self) -> pd.DataFrame:
        """One row a step."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...


class Dashboard(Live):
    """Step, reward, throughput, a reward curve and a phase bar of a log, kept up to date.

    Show it by its name at the end of a cell. It draws in a thread of its own, at most every
    `interval_s` (0.5 s) and at most 5 % of the time however long the log, so that `log.add` costs
    the training microseconds and errors of drawing stay out of it; they are logged once under
    "rlkit.viz" and shown in the widget. The last state is always drawn: by the thread, by
    `close()`, and at the end of the process.

    Outside Jupyter, or where `stream` is given, it writes one line instead: over itself on a
    terminal, otherwise at most every 5 s. total_steps: for the progress bar and the time left.
    clock and call_later are for tests: seconds now, and (delay_s, function) -> cancellable.
    """

    least_interval_s = 0.1  # above 10 a second a front end falls behind (jupyter/notebook#4583)

    def __init__(
        self,
        log: Log,
        *,
        total_steps: int | None = None,
        interval_s: float = 0.5,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater = call_in_thread,
    ) -> None:
        _check(log, total_steps)
        widget = None if stream is not None else html_widget()
        super().__init__(widget, interval_s=interval_s, clock=clock, call_later=call_later)
        self._log, self._total_steps = log, total_steps
        self._stream = stream if stream is not None else sys.stderr
        self._overwrites = self._stream.isatty()
        if self.widget is None and not self._overwrites:  # a log file
            self._interval_s = max(interval_s, LOG_LINE_INTERVAL_S)
        self._changed, self._next_draw_s = False, clock()
        self._row_times_s: deque[float] = deque(maxlen=6)
        self._summary, self._line = Summary(num_total=total_steps), ""
        self._display_id, self._published = uuid.uuid4().hex, ""  # the page in the cell's output
        self._stop_listening = log.listen(self._on_add)  # before drawing, so that no row is missed
        self._draw()
        _open_dashboards.add(self)

    def _end(self) -> None:
        self._stop_listening()
        self._draw(last=True)
        if self._published:
            after_cells(self._on_cell_end, call=False)
            self._publish()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "live"
        return f"Dashboard({state}: {terminal_line(self._summary)})"

    def _ipython_display_(self) -> None:
        """Show the widget. The cell's output is brought up to date when a cell ends and by
        `close()`, which puts the last state in the widget's place: nbconvert and GitHub run none.
        """
        if self.widget is None:
            raise NotImplementedError("IPython shows the text instead")
        from IPython.display import display

        self._published = self._page
        display(self._repr_mimebundle_(), raw=True, display_id=self._display_id)
        if not self._closed:
            after_cells(self._on_cell_end, call=True)

    def _on_cell_end(self, result: object) -> None:
        if self._changed:
            self._draw()
        if self._page != self._published:
            self._publish()

    def _publish(self) -> None:
        """Replace the cell's output by the present state."""
        from IPython.display import update_display

        with self._reporting():  # the connection may be gone
            self._published = self._page
            update_display(self._repr_mimebundle_(), raw=True, display_id=self._display_id)

    def _on_add(self, log: Log) -> None:
        """Note that a row came, and see that it will be drawn."""
        with self._reporting(), self._lock:  # there may be no thread to be had
            self._row_times_s.append(self._clock())
            self._changed = True
            self._schedule()

    def _schedule(self) -> None:
        """Plan one drawing if there is news and none is planned or going on; holds the lock."""
        if self._changed and not self._closed and self._pending is None:
            delay_s = max(0.0, self._next_draw_s - self._clock())
            self._pending = self._call_later(delay_s, self._on_time)

    def _on_time(self) -> None:
        self._draw()
        with self._lock:
            self._pending = None
            self._schedule()

    def _draw(self, *, last: bool = False) -> None:
        """Show the log as it is now."""
        with self._draw_lock:
            with self._lock:
                if self._closed and not last:
                    return
                self._changed = False
                times_s = list(self._row_times_s)
            start_s = self._clock()
            with self._reporting():
                self._show(self._log.frame(), times_s, last=last)
            cost_s = self._clock() - start_s
            with self._lock:
                self._next_draw_s = start_s + max(self._interval_s, cost_s / MAX_DRAW_SHARE)

    def _show(self, frame: pd.DataFrame, times_s: list[float], *, last: bool) -> None:
        row_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None
        self._summary = summarise(frame, total_steps=self._total_steps, row_s=row_s)
        if self.widget is not None:
            self._page = page_html(frame, self._summary)
            self.widget.value = self._page
            if last:
                self._picture = picture(frame)
        elif not frame.empty:
            self._write(terminal_line(self._summary), last=last)

    def _write(self, line: str, *, last: bool) -> None:
        """The line over the one before on a terminal, below it elsewhere (and not twice)."""
        if self._overwrites:
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(len(self._line)) + ("\n" if last else ""))
        elif line != self._line:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._line = line

    def _show_error(self, html: str) -> None:
        if self.widget is not None:
            self.widget.value = html + self._page


def _check(log: object, total_steps: int | None) -> None:
    if not all(hasattr(log, name) for name in ("listen", "frame", "__len__")):
        raise TypeError(
            f"log: got {type(log).__name__}, need a log with listen, frame and a length. "
            "Pass the rlkit.MetricLog itself, not its frame."
        )
    if total_steps is not None:
        whole("total_steps", total_steps, what="step")


@atexit.register
def _close_all() -> None:
    """Draw what is not drawn yet before the process ends; its threads are daemons."""
    for dashboard in list(_open_dashboards):
        dashboard.close()
