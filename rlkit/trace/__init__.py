"""The trace: which worker did what, from when to when, on how much, with how much memory.

Every stage call, store operation, weight move and wait is a span of the trace of the process it
runs in; a cluster brings the spans of its workers to the driver with the results of their calls.
``trace.frame()`` is the table, ``trace.to_chrome(path)`` a file for Perfetto, ``trace.timeline()``
the picture.
"""

import os
from pathlib import Path
from typing import Any

from rlkit.trace.memory import CATEGORIES, MOMENTS, Meter, storage_bytes
from rlkit.trace.spans import (
    OpenSpan,
    Span,
    Trace,
    current,
    label,
    labelled,
    note,
    sample_memory,
    span,
    stage_span,
    use,
    wait,
)
from rlkit.trace.tables import check_spans, idle_fractions, is_inside, merged, wall_s

__all__ = [
    "CATEGORIES",
    "MOMENTS",
    "Meter",
    "OpenSpan",
    "Span",
    "Trace",
    "check_spans",
    "current",
    "frame",
    "idle_fractions",
    "is_inside",
    "label",
    "labelled",
    "merged",
    "note",
    "sample_memory",
    "span",
    "stage_span",
    "storage_bytes",
    "timeline",
    "to_chrome",
    "use",
    "wait",
    "wall_s",
]


def frame() -> Any:
    """DataFrame of this process's trace: ``Trace.frame``."""
    return current().frame()


def to_chrome(path: str | os.PathLike[str]) -> Path:
    """Write this process's trace as a file that Perfetto opens: ``Trace.to_chrome``."""
    return current().to_chrome(path)


def timeline() -> Any:
    """Draw this process's trace: ``Trace.timeline``."""
    return current().timeline()
