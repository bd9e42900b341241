"""What live views share: one planned drawing, errors that end no training, a last state."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, Protocol, Self

logger = logging.getLogger("rlkit.viz")


class Cancellable(Protocol):
    """What `call_later` returns."""

    def cancel(self) -> None:
        """Do not call any more."""


CallLater = Callable[[float, Callable[[], None]], Cancellable]
"""(delay_s, function) -> what cancels it."""


def call_in_thread(delay_s: float, function: Callable[[], None]) -> Cancellable:
    """Call the function after a while in a thread that does not keep the process alive."""
    timer = threading.Timer(delay_s, function)
    timer.daemon = True
    timer.start()
    return timer


class Live:
    """A view that threads draw until it is closed; after that its last state is shown."""

    least_interval_s = 0.1

    def __init__(
        self, widget: Any, *, interval_s: float, clock: Callable[[], float], call_later: CallLater
    ) -> None:
        if not interval_s >= self.least_interval_s:
            raise ValueError(
                f"interval_s: got {interval_s!r}, need {self.least_interval_s} s or more, or the "
                "browser falls behind. 0.5 is smooth enough."
            )
        self.widget = widget
        self._interval_s, self._clock, self._call_later = interval_s, clock, call_later
        self._lock = threading.Lock()  # guards what is planned; held for microseconds
        self._draw_lock = threading.Lock()  # one thread draws
        self._pending: Cancellable | None = None
        self._closed = False
        self._page = ""
        self._picture: dict[str, object] = {}
        self._reported: set[type[BaseException]] = set()

    def close(self) -> None:
        """Draw the last state and stop; what is shown stays. Safe to repeat."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pending is not None:
                self._pending.cancel()
        self._end()

    def _end(self) -> None:
        """Draw the last state."""
        raise NotImplementedError

    def _show_error(self, html: str) -> None:
        """Show an error of drawing."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """An error inside is logged, once a kind, and shown; never raised."""
        try:
            yield
        except Exception as error:  # a display must not end a training
            text = f"{type(error).__name__}: {error}"
            said = f"{type(self).__name__} could not draw, the training goes on"
            if type(error) not in self._reported:
                self._reported.add(type(error))
                logger.warning("%s: %s", said, text, exc_info=error)
            with contextlib.suppress(Exception):  # the connection itself may be what failed
                self._show_error(
                    '<div role="alert" style="border-left:4px solid #bd1f01;padding-left:8px;'
                    f'font-size:13px">{said}: {escape(text[:500])}</div>'
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, object]:
        if self.widget is None:
            return {"text/plain": repr(self)}
        page: dict[str, object] = {"text/plain": repr(self), "text/html": self._page}
        if self._closed:  # no widget any more: what a saved notebook has must show without a kernel
            return page | self._picture
        return self.widget._repr_mimebundle_(include=include, exclude=exclude) | page
