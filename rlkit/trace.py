"""Spans: which worker did what, from when to when, on how many rows and tokens."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stage call of one worker; times are seconds since the epoch on the worker's clock."""

    stage: str
    """What ran: generate, score, logprobs, ref_logprobs, update, reshard, ..."""
    start_s: float
    """When it began."""
    end_s: float
    """When it ended."""
    worker: str = "driver"
    """Worker name, such as ``actor/0``."""
    node: str = "local"
    """Ray node id, or ``local``."""
    rows: int = 0
    """Rows handled."""
    tokens: int = 0
    """Prompt + response tokens handled."""
    version: int = 0
    """Policy version of the worker when the call ended."""
    devices: int = 1
    """Devices of the cluster the worker belongs to."""
    call: int = -1
    """Number of the group call this is a part of; ranks of one call share it."""


class Trace:
    """Spans of a run, oldest first; keeps the newest ``limit``."""

    def __init__(self, *, limit: int = 200_000) -> None:
        self._spans: list[Span] = []
        self._dropped = 0
        self._limit = limit
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Record one span."""
        with self._lock:
            self._spans.append(span)
            if len(self._spans) > self._limit:
                cut = max(1, self._limit // 4)
                del self._spans[:cut]
                self._dropped += cut

    def mark(self) -> int:
        """A position in the trace, for ``since``."""
        with self._lock:
            return self._dropped + len(self._spans)

    def since(self, mark: int) -> list[Span]:
        """Spans recorded after ``mark``."""
        with self._lock:
            return self._spans[max(0, mark - self._dropped) :]

    def frame(self) -> Any:
        """DataFrame, a row a span."""
        import pandas as pd

        return pd.DataFrame(
            [asdict(s) for s in self.since(0)], columns=[item.name for item in fields(Span)]
        )

    @contextmanager
    def span(self, stage: str, **facts: Any) -> Iterator[None]:
        """Record the body of a ``with`` as one span of this process."""
        start = time.time()
        try:
            yield
        finally:
            self.add(Span(stage=stage, start_s=start, end_s=time.time(), **facts))


_process = Trace()
_label: ContextVar[str | None] = ContextVar("stage", default=None)


@contextmanager
def labelled(stage: str) -> Iterator[None]:
    """Record the stage calls made inside under one name.

    The generation of an evaluation is evaluation.
    """
    token = _label.set(stage)
    try:
        yield
    finally:
        _label.reset(token)


def label(stage: str) -> str:
    """The name to record a stage under."""
    return _label.get() or stage


def current() -> Trace:
    """The trace of this process: group calls add to it, a metric log reads it."""
    return _process


def wall_s(spans: list[Span]) -> dict[str, float]:
    """Seconds by stage: ranks of one call count once, from the first start to the last end."""
    calls: dict[tuple[str, int], tuple[float, float]] = {}
    for n, span in enumerate(spans):
        key = (span.stage, span.call if span.call >= 0 else -2 - n)
        low, high = calls.get(key, (span.start_s, span.end_s))
        calls[key] = (min(low, span.start_s), max(high, span.end_s))
    totals: dict[str, float] = {}
    for (stage, _), (low, high) in calls.items():
        totals[stage] = totals.get(stage, 0.0) + high - low
    return totals
