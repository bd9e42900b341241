"""Spans, the trace that keeps them, and the one-line ways to record them."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlkit.trace.memory import Meter

FACTS = ("stage", "worker", "node", "rows", "tokens", "bytes", "version", "devices", "call")
"""What an open span knows of the one it becomes, beside times and memory."""
WAIT = "wait/"
"""What the stage of a span that only waits begins with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One piece of a worker's time; times are seconds since the epoch on the worker's clock."""

    stage: str
    """What ran: generate, score, update, reshard, store/put, wait/update, ..."""
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
    bytes: int = 0
    """Bytes moved: values put, fetched or freed, weights sent or received."""
    version: int = 0
    """Policy version of the worker when the call ended."""
    devices: int = 1
    """Devices of the cluster the worker belongs to."""
    call: int = -1
    """Number of the group call this is a part of; ranks of one call share it."""
    before: Mapping[str, int] | None = None
    """Memory when it began: bytes by category, of ``allocated`` bytes in all; None: not sampled."""
    after: Mapping[str, int] | None = None
    """Memory when it ended."""
    peak: Mapping[str, int] | None = None
    """Memory at the fullest moment known between the two."""


class Trace:
    """Spans of a run, oldest first; keeps the newest ``limit``. With ``limit=0`` it keeps none."""

    def __init__(self, *, limit: int = 100_000) -> None:
        if limit < 0:
            raise ValueError(f"limit: got {limit}, need 0 or more spans. 0 turns the trace off.")
        self._spans: list[Span] = []
        self._dropped = 0
        self._limit = limit
        # Rows are freed, and that is recorded, when Python collects garbage: perhaps inside add.
        self._lock = threading.RLock()

    @property
    def on(self) -> bool:
        """Whether it records spans."""
        return self._limit > 0

    def add(self, span: Span) -> None:
        """Record one span."""
        if not self._limit:
            return
        with self._lock:
            self._spans.append(span)
            if len(self._spans) > self._limit:
                self._drop(max(1, self._limit // 4))

    def extend(self, spans: Sequence[Span], *, devices: int) -> None:
        """Record what a worker of a cluster with that many devices has drained."""
        for each in spans:
            self.add(replace(each, devices=devices))

    def _drop(self, num: int) -> None:
        del self._spans[:num]
        self._dropped += num

    def mark(self) -> int:
        """A position in the trace, for ``since``."""
        with self._lock:
            return self._dropped + len(self._spans)

    def since(self, mark: int) -> list[Span]:
        """Spans recorded after ``mark``."""
        with self._lock:
            return self._spans[max(0, mark - self._dropped) :]

    def drain(self) -> list[Span]:
        """All spans, which the trace then no longer has: a worker's, on their way to the driver."""
        with self._lock:
            spans = list(self._spans)
            self._drop(len(spans))
        return spans

    def span(
        self,
        stage: str,
        *,
        rows: int = 0,
        tokens: int = 0,
        bytes: int = 0,
        version: int = 0,
        devices: int = 1,
    ) -> "OpenSpan":
        """Record the body of a ``with`` as one span; its facts may be set until the body ends."""
        opened = OpenSpan(self, stage)
        opened.rows, opened.tokens, opened.bytes = rows, tokens, bytes
        opened.version, opened.devices = version, devices
        return opened

    def frame(self) -> Any:
        """DataFrame, a row a span; memory as columns such as ``after/weights_bytes``."""
        from rlkit.trace.tables import frame_of

        return frame_of(self.since(0))

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write trace-event JSON, which ui.perfetto.dev and chrome://tracing open."""
        from rlkit.trace.chrome import write

        return write(self.since(0), path)

    def timeline(self) -> Any:
        """Draw one lane a worker: ``rk.viz.plot_timeline(trace.frame())``."""
        from rlkit.viz import plot_timeline

        return plot_timeline(self.frame())


class OpenSpan:
    """A span whose body still runs. One inside another has the other's worker, node and call."""

    __slots__ = (*FACTS, "_looks", "_meter", "_start_s", "_token", "_trace")

    def __init__(self, trace: Trace, stage: str) -> None:
        self.stage, self._trace = stage, trace
        self.rows = self.tokens = self.bytes = self.version = 0
        self.devices = 1
        above = _open.get()
        if above is None:
            self.worker, self.node, self.call = "driver", "local", -1
        else:
            self.worker, self.node, self.call = above.worker, above.node, above.call
        self._meter: Meter | None = None  # of the worker whose memory and version these are
        self._looks: list[dict[str, int]] = []

    def __enter__(self) -> "OpenSpan":
        self._token = _open.set(self)
        if self._meter is not None and self._trace.on:
            self._looks = self._meter.start()
        self._start_s = time.time()
        return self

    def __exit__(self, *exc: object) -> None:
        end_s = time.time()
        _open.reset(self._token)
        if not self._trace.on:
            return
        before = after = peak = None
        if self._meter is not None:
            self.version = int(getattr(self._meter.worker, "version", 0))
            if exc[0] is None:
                seconds = end_s - self._start_s
                before, after, peak = self._meter.end(self._looks, seconds)
            else:  # a failed worker may know too little of its memory
                self._meter.forget()
        facts = {name: getattr(self, name) for name in FACTS}
        end_s = max(end_s, self._start_s)  # the clock may be set back meanwhile
        times = {"start_s": self._start_s, "end_s": end_s}
        self._trace.add(Span(before=before, after=after, peak=peak, **times, **facts))

    def sample_memory(self) -> None:
        """Look at the worker's memory now; the fullest look is the span's ``peak``."""
        if self._looks and self._meter is not None:
            self._meter.more(self._looks)


_process = Trace()
_open: ContextVar[OpenSpan | None] = ContextVar("span", default=None)
_label: ContextVar[str | None] = ContextVar("stage", default=None)


def current() -> Trace:
    """The trace of this process: group calls add to it, a metric log reads it."""
    return _process


@contextmanager
def use(trace: Trace) -> Iterator[Trace]:
    """Make ``trace`` that of this process for a while: ``with trace.use(Trace(limit=0))``."""
    global _process
    before, _process = _process, trace
    try:
        yield trace
    finally:
        _process = before


def span(stage: str, *, rows: int = 0, tokens: int = 0, bytes: int = 0) -> OpenSpan:
    """Record the body of a ``with`` in the trace of this process."""
    return _process.span(stage, rows=rows, tokens=tokens, bytes=bytes)


def wait(what: str) -> OpenSpan:
    """Record the body of a ``with`` as waiting for ``what``: a stage of other workers, peers."""
    return OpenSpan(_process, WAIT + what)


def stage_span(
    stage: str, of: Any, *, worker: str, node: str = "local", call: int = -1
) -> OpenSpan:
    """Record the body of a ``with`` as a stage call of the worker ``of``.

    Its version, and its memory before and after, come from that object: ``of.version``, and
    ``of.memory()``, bytes by category, if it has them. ``of`` may be the worker's ``Meter``, which
    keeps the last look at it for the next call.
    """
    opened = OpenSpan(_process, stage)
    opened.worker, opened.node, opened.call = worker, node, call
    opened._meter = of if isinstance(of, Meter) else Meter(of)
    return opened


def note(*, rows: int = 0, tokens: int = 0, bytes: int = 0) -> None:
    """Add to the facts of the span that this code runs in, if it runs in one."""
    opened = _open.get()
    if opened is not None:
        opened.rows += rows
        opened.tokens += tokens
        opened.bytes += bytes


def sample_memory() -> None:
    """Look at the memory of the worker whose stage this code runs in, where it holds much of it."""
    opened = _open.get()
    if opened is not None:
        opened.sample_memory()


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
