"""The trace as tables: a row a span; how long each worker worked, waited and idled."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from rlkit.trace.memory import CATEGORIES, MOMENTS
from rlkit.trace.spans import WAIT, Span

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("stage", "worker", "start_s", "end_s")
"""Columns that a frame of spans must have."""


def frame_of(spans: Sequence[Span]) -> "pd.DataFrame":
    """A row a span, oldest first; columns such as ``after/weights_bytes`` where memory is known."""
    import pandas as pd

    names = [item.name for item in fields(Span) if item.name not in MOMENTS]
    columns: dict[str, Any] = {name: [getattr(span, name) for span in spans] for name in names}
    for moment in MOMENTS:
        memory = [getattr(span, moment) or {} for span in spans]
        for category in (*CATEGORIES, "residual", "allocated"):
            sizes = [each.get(category, 0 if each else None) for each in memory]
            if any(sizes) or (category == "residual" and any(memory)):
                columns[f"{moment}/{category}_bytes"] = pd.array(sizes, dtype="Int64")
    return pd.DataFrame(columns)


def check_spans(frame: Any) -> "pd.DataFrame":
    """The frame itself if it holds spans: the needed columns, some rows, ends after starts."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"frame: got {type(frame).__name__}, need a DataFrame with one row a span. "
            "Pass what trace.frame() returns."
        )
    absent = [name for name in NEEDED if name not in frame.columns]
    if absent:
        raise ValueError(
            f"frame: got columns {', '.join(map(str, frame.columns)) or 'none'}, need "
            f"{', '.join(absent)} too. Pass trace.frame(), which has a row a span; log.frame() has "
            "a row a step."
        )
    if frame.empty:
        raise ValueError(
            "frame: got no spans, need at least one. Run a stage of a worker group first; after "
            "trace.use(Trace(limit=0)) nothing is recorded."
        )
    times = frame[["start_s", "end_s"]].to_numpy(float)
    bad = np.flatnonzero(~(np.isfinite(times).all(axis=1) & (times[:, 1] >= times[:, 0])))
    if len(bad):
        row = frame.iloc[bad[0]]
        raise ValueError(
            f"frame: got {row['stage']!r} of {row['worker']} from {row['start_s']} s to "
            f"{row['end_s']} s, need finite times and no end before its start. "
            "Drop such rows, or mend the clock they come from."
        )
    return frame


def idle_fractions(frame: "pd.DataFrame") -> "pd.DataFrame":
    """A row a worker: ``busy_s``, ``waiting_s``, ``window_s`` and ``idle_fraction``.

    The window is the whole frame's, from the first start to the last end, for every worker. A
    worker is busy while any of its spans runs, counted once however many overlap, and no ``wait/``
    span does; waiting is idling. What no span covers is idle, too: on the driver that includes the
    notebook's own Python. A window of no length has no idle fraction (NaN).
    """
    import pandas as pd

    everything = check_spans(frame)[["start_s", "end_s"]].to_numpy(float)
    window_s = float(everything[:, 1].max() - everything[:, 0].min())
    rows = []
    for worker, spans in frame.groupby("worker", sort=False):
        times = spans[["start_s", "end_s"]].to_numpy(float)
        waits = spans["stage"].astype(str).str.startswith(WAIT).to_numpy(bool)
        waiting_s = _length(merged(times[waits]))
        busy_s = max(0.0, _length(merged(times)) - waiting_s)
        idle = 1.0 - min(1.0, busy_s / window_s) if window_s > 0 else float("nan")
        rows.append((worker, busy_s, waiting_s, window_s, idle))
    return pd.DataFrame(
        rows, columns=["worker", "busy_s", "waiting_s", "window_s", "idle_fraction"]
    )


def merged(times: Any, *, gap_s: float = 0.0) -> np.ndarray:
    """Intervals [N, 2] -> disjoint ones [M, 2] that cover the same, and gaps up to ``gap_s``."""
    times = np.asarray(times, dtype=float).reshape(-1, 2)
    times = times[np.argsort(times[:, 0], kind="stable")]
    if not len(times):
        return times
    reach = np.maximum.accumulate(times[:, 1])
    first = np.flatnonzero(np.r_[True, times[1:, 0] > reach[:-1] + gap_s])
    return np.stack([times[first, 0], reach[np.r_[first[1:] - 1, len(times) - 1]]], axis=1)


def _length(intervals: np.ndarray) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def nested_tracks(times: Sequence[Sequence[float]]) -> list[list[int]]:
    """Indices of intervals by track: on one track, two either lie apart or one in the other.

    Each goes to the first track it fits on, by start, the longer first.
    """
    order = sorted(range(len(times)), key=lambda i: (times[i][0], -times[i][1]))
    tracks: list[list[int]] = []
    around: list[list[float]] = []  # by track: ends of the intervals around the next one
    for i in order:
        start, end = times[i]
        for track, ends in zip(tracks, around, strict=True):
            while ends and ends[-1] <= start and ends[-1] < end:
                ends.pop()
            if not ends or end <= ends[-1]:
                track.append(i)
                ends.append(end)
                break
        else:
            tracks.append([i])
            around.append([end])
    return tracks


def is_inside(times: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each interval lies in another one; of equal ones, the later in the earlier."""
    found = [False] * len(times)
    reach = -float("inf")
    for i in sorted(range(len(times)), key=lambda i: (times[i][0], -times[i][1])):
        found[i] = times[i][1] <= reach
        reach = max(reach, times[i][1])
    return found


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
