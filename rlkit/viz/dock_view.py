"""A live view of a transfer dock, and of one sample in it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any, Protocol

import pandas as pd

from rlkit.viz.dock import parts_of
from rlkit.viz.kernel import html_widget
from rlkit.viz.live import CallLater, Live, call_in_thread

MAX_DRAW_SHARE = 0.2  # of the time at most: a dock that does not answer is asked less often
MAX_ROWS = 200  # to choose from
MAX_CHARS, MAX_NUMBERS = 2000, 64  # of a value
FETCH_S = 0.5
NONE = -1  # uid of no row
NO_CHOICE = ("choose a row", NONE)


class Look(Protocol):
    """What a dock says of itself."""

    frame: pd.DataFrame
    """Rows of `dock.frame()`."""
    note: str
    """Why it is an old look, if it is one."""
    gone: bool
    """Whether the dock was closed."""

    def _repr_html_(self) -> str: ...


class Dock(Protocol):
    """What a view asks of a dock."""

    def look(self, *, limit: int) -> Look:
        """The first rows by uid, in a bounded time."""
        ...

    def fetch(self, uids: Any, columns: Any, timeout_s: float | None) -> Any:
        """Columns of rows by uid, as a batch."""
        ...


class DockView(Live):
    """A dock's rows, states and versions, kept up to date, and one sample of your choice.

    Show it by its name at the end of a cell. It draws every `interval_s` (0.5 s) in a daemon
    thread, and less often where the dock answers slowly; errors of drawing are logged once under
    "rlkit.viz" and shown. It ends with `close()`, when nobody names it or the dock any more (it
    does not keep the dock alive), and when the dock is closed; what is shown stays. The values of
    the chosen row are fetched with each drawing, which the dock's traffic counts.

    Outside Jupyter it draws nothing; its repr is the dock's, as text. call_later is for tests.
    """

    least_interval_s = 0.25

    def __init__(
        self,
        dock: Dock,
        *,
        interval_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        call_later: CallLater = call_in_thread,
    ) -> None:
        if not all(hasattr(dock, name) for name in ("look", "fetch")):
            raise TypeError(
                f"dock: got {type(dock).__name__}, need a dock with look and fetch. Pass the "
                "rk.TransferDock itself, not its frame."
            )
        super().__init__(None, interval_s=interval_s, clock=clock, call_later=call_later)
        self._dock = weakref.ref(dock)
        self._chosen, self._offering = NONE, False
        self.table, self.sample = html_widget(), html_widget()
        self.rows: Any = None
        if self.table is not None:
            import ipywidgets

            self.rows = ipywidgets.Dropdown(options=[NO_CHOICE], description="sample")
            self.rows.observe(partial(_on_choice, weakref.ref(self)), "value")
            self.widget = ipywidgets.VBox([self.table, self.rows, self.sample])
            self._go_on()

    def _end(self) -> None:
        self._draw(wait_s=1.0)

    def _show_error(self, html: str) -> None:
        self.sample.value = html

    def __repr__(self) -> str:
        dock = self._dock()
        return f"DockView({'the dock is gone' if dock is None else repr(dock)})"

    def _go_on(self) -> None:
        """Draw, and plan the next drawing unless this was the last."""
        start_s = self._clock()
        last = self._draw(wait_s=0)
        cost_s = self._clock() - start_s
        self._plan(max(self._interval_s - cost_s, cost_s * (1 / MAX_DRAW_SHARE - 1)), last=last)

    def _plan(self, delay_s: float, *, last: bool = False) -> None:
        """Plan the one next drawing."""
        with self._lock:
            self._closed = self._closed or last
            if self._pending is not None:
                self._pending.cancel()
            if not self._closed:
                with self._reporting():  # no thread to be had
                    self._pending = self._call_later(delay_s, partial(_draw_on, weakref.ref(self)))

    def _choose(self, uid: int) -> None:
        """A row was chosen: draw at once, but in a thread, for its values may take a while."""
        if not self._offering:
            self._chosen = uid
            self._plan(0.0)

    def _draw(self, *, wait_s: float) -> bool:
        """Show the dock as it is now, and the chosen row; whether that was the last of it."""
        dock = self._dock()
        if dock is None or self.table is None:
            return True
        if not self._draw_lock.acquire(timeout=wait_s):  # another thread draws, or hangs
            return False
        try:
            with self._reporting():
                look = dock.look(limit=MAX_ROWS)
                self._page = self.table.value = look._repr_html_()
                self._offer(look.frame)
                self.sample.value = self._sample(dock, look)
                return look.gone
        finally:
            self._draw_lock.release()
        return False

    def _offer(self, frame: pd.DataFrame) -> None:
        """The rows to choose from; a choice that is not among them any more stays."""
        uids = [int(uid) for uid in frame["uid"][:MAX_ROWS]] if "uid" in frame else []
        if self._chosen not in (NONE, *uids):
            uids.append(self._chosen)
        options = [NO_CHOICE, *((str(uid), uid) for uid in uids)]
        if list(self.rows.options) != options:
            self._offering = True
            try:
                self.rows.options = options  # which moves the choice to the first
                self.rows.value = self._chosen
            finally:
                self._offering = False

    def _sample(self, dock: Dock, look: Look) -> str:
        """The values of the chosen row."""
        uid = self._chosen
        if uid == NONE or look.note:  # no answer: a fetch would wait for the same controllers
            return ""
        row = look.frame[look.frame["uid"] == uid]
        if row.empty:
            return f"row {uid} is not among the first {MAX_ROWS} any more: consumed, or cleared"
        columns = [name for name in parts_of(look.frame)[0] if row[name].item() != "empty"]
        batch = dock.fetch([uid], columns, timeout_s=FETCH_S)
        lines = "".join(
            f"<tr><th>{escape(name)}</th><td>{value_html(batch[name][0])}</td></tr>"
            for name in columns
        )
        return f"<b>row {uid}</b><table>{lines}</table>"


def value_html(value: Any) -> str:
    """A row's value: text as it stands, numbers one after the other, of long ones the beginning."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list) and len(value) > MAX_NUMBERS:
        return f"{value_html(value[:MAX_NUMBERS])} … {len(value)} in all"
    if isinstance(value, list):
        return " ".join(value_html(each) for each in value)
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    more = f" … {len(text)} characters" if len(text) > MAX_CHARS else ""
    shown = escape(text[:MAX_CHARS])
    return f'<span style="white-space:pre-wrap">{shown}</span>{more}'


def _draw_on(view: weakref.ref[DockView]) -> None:
    """The planned drawing, unless nobody has the view any more."""
    live = view()
    if live is not None:
        live._go_on()


def _on_choice(view: weakref.ref[DockView], change: Any) -> None:
    """The widget's choice changed; a widget must not keep its view alive."""
    live = view()
    if live is not None:
        live._choose(int(change["new"]))
