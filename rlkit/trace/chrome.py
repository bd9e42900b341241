"""Trace-event JSON (the format of chrome://tracing), which Perfetto opens: ui.perfetto.dev.

A node is a process, a worker a thread, a span a complete event; memory is a counter of its worker.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlkit.trace.spans import WAIT, Span
from rlkit.trace.tables import nested_tracks


def write(spans: Sequence[Span], path: str | os.PathLike[str]) -> Path:
    """Write the spans to ``path``; folders are made as needed."""
    if not spans:
        raise ValueError(
            "trace: got no spans, need at least one. Run a stage of a worker group before "
            "to_chrome()."
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events(spans), "displayTimeUnit": "ms"}))
    return path


def events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Metadata, complete events and counters; times are microseconds since the first start.

    Spans of a worker that overlap without one lying in the other, as those of several threads do,
    go to a second thread of that worker: slices of one track must be nested.
    """
    nodes = {node: pid for pid, node in enumerate(dict.fromkeys(s.node for s in spans), 1)}
    workers: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        workers.setdefault((span.node, span.worker), []).append(span)
    found = [_name("process", pid, 0, f"node {node}") for node, pid in nodes.items()]
    zero_s, tid = min(span.start_s for span in spans), 0
    for (node, worker), mine in workers.items():
        times = [(span.start_s, span.end_s) for span in mine]
        for number, track in enumerate(nested_tracks(times), 1):
            tid += 1
            place = {"pid": nodes[node], "tid": tid}
            found.append(_name("thread", **place, name=_track_name(worker, number)))
            found += [_slice(mine[i], zero_s) | place for i in track]
        found += [e | {"pid": nodes[node], "tid": 0} for e in _counters(worker, mine, zero_s)]
    return found


def _track_name(worker: str, number: int) -> str:
    return worker if number == 1 else f"{worker} ({number})"


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(span: Span, zero_s: float) -> dict[str, Any]:
    """A complete event. Whole nanoseconds: ts + dur of a slice must not exceed its parent's."""
    start_ns, end_ns = (round((t - zero_s) * 1e9) for t in (span.start_s, span.end_s))
    facts = ("rows", "tokens", "bytes", "version", "call", "devices")
    return {
        "ph": "X",
        "name": span.stage,
        "cat": "wait" if span.stage.startswith(WAIT) else span.stage.split("/")[0],
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": {name: getattr(span, name) for name in facts},
    }


def _counters(worker: str, spans: Sequence[Span], zero_s: float) -> Iterator[dict[str, Any]]:
    """Memory by category of one worker, where it was sampled."""
    for span in spans:
        for memory, time_s in ((span.before, span.start_s), (span.after, span.end_s)):
            if memory is not None:
                sizes = {name: size for name, size in memory.items() if name != "allocated"}
                yield {
                    "ph": "C",
                    "name": f"memory of {worker} [B]",
                    "ts": round((time_s - zero_s) * 1e9) / 1e3,
                    "args": sizes,
                }
