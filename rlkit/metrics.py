"""Metrics: the log, its records, and what throughput means."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlkit import trace as trace_module
from rlkit.functions import Source
from rlkit.glossary import GLOSSARY, unit_of


def tokens_per_s_per_device(tokens: float, *, seconds: float, devices: int) -> float:
    """Throughput as the toolkit defines it.

    Prompt + response tokens of trained samples / devices / seconds.
    """
    if seconds <= 0 or devices < 1:
        raise ValueError(
            f"throughput: got {seconds} seconds on {devices} devices, need more than 0 seconds "
            "and at least 1 device."
        )
    return tokens / devices / seconds


class StepMetrics(dict):
    """Metrics of one call, name -> number, with the sources of the functions that made them.

    ``shares`` are this rank's parts of sums over ranks (maxima and minima for names in _max, _min);
    ``same`` are numbers and words that all ranks agree on.
    """

    def __init__(
        self,
        shares: Mapping[str, Any] | None = None,
        *,
        same: Mapping[str, Any] | None = None,
        sources: Mapping[str, Source] | None = None,
    ) -> None:
        super().__init__({**(shares or {}), **(same or {})})
        self.shares, self.same = dict(shares or {}), dict(same or {})
        self.sources: dict[str, Source] = dict(sources or {})

    @staticmethod
    def merge(ranks: Sequence["StepMetrics"]) -> "StepMetrics":
        """One rank's parts each -> the metrics of the call."""
        shares = reduce_metrics([rank.shares for rank in ranks])
        return StepMetrics(shares, same=ranks[0].same, sources=ranks[0].sources)

    def __or__(self, other: Mapping[str, Any]) -> "StepMetrics":
        return StepMetrics({**self, **other}, sources=self.sources | getattr(other, "sources", {}))

    def __ror__(self, other: Mapping[str, Any]) -> "StepMetrics":
        return StepMetrics({**other, **self}, sources=self.sources)

    def __ior__(self, other: Mapping[str, Any]) -> "StepMetrics":
        self.update(other)
        self.sources |= getattr(other, "sources", {})
        return self

    def __reduce__(self) -> Any:
        return _step_metrics, (dict(self), self.shares, self.same, self.sources)


def _step_metrics(
    values: dict[str, Any], shares: dict[str, Any], same: dict[str, Any], sources: dict[str, Source]
) -> StepMetrics:
    out = StepMetrics(shares, same=same, sources=sources)
    out.clear()  # what was bound or deleted by hand counts
    out.update(values)
    return out


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of micro-batches, steps or ranks as one: sums, of names in _max and _min the extreme.

    A part may lack some of the names.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    values = {name: [part[name] for part in parts if name in part] for name in names}
    how = {"_max": max, "_min": min}
    return {name: how.get(name[-4:], sum)(found) for name, found in values.items()}


class MetricLog:
    """One record a step, as a DataFrame.

    Adds seconds by stage and throughput from the trace by itself.
    """

    def __init__(self, *, trace: trace_module.Trace | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self.sources: dict[str, Source] = {}
        self._trace = trace or trace_module.current()
        self._listeners: list[Callable[[MetricLog], None]] = []
        self._lock = threading.Lock()
        self.start()

    def start(self) -> None:
        """Begin timing the next step here.

        Call it after a pause, so that the pause is not counted.
        """
        self._mark, self._time = self._trace.mark(), time.time()

    def add(self, step: int, metrics: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Record a step: numbers, 0-d tensors or short strings by name.

        ``values`` join ``metrics``.
        """
        if not isinstance(step, int) or isinstance(step, bool):
            raise TypeError(
                f"step: got {type(step).__name__}, need an int, the number of the step."
            )
        given = {**(metrics or {}), **values}
        if "step" in given:
            raise ValueError(
                f"step: got {given['step']} as a metric, need another name: the record of step "
                f"{step} has that one."
            )
        record: dict[str, Any] = {"step": step}
        for name, value in given.items():
            record[name] = _plain(name, value)
        spans, now = self._trace.since(self._mark), time.time()
        record |= {k: v for k, v in _from_spans(spans, now - self._time).items() if k not in record}
        with self._lock:
            self.records.append(record)
            self.sources |= getattr(metrics, "sources", {})
            listeners = list(self._listeners)
        self._mark, self._time = self._trace.mark(), now
        for listener in listeners:
            listener(self)

    def listen(self, callback: Callable[["MetricLog"], None]) -> Callable[[], None]:
        """Call ``callback(log)`` after each record; returns a function that stops it."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback) if callback in self._listeners else None

    def frame(self) -> Any:
        """DataFrame, a row a record: step and reward first, then in order of appearance.

        Units are in ``GLOSSARY``.
        """
        import pandas as pd

        with self._lock:
            records = list(self.records)
        found = dict.fromkeys(name for record in records for name in record)
        first = [name for name in ("step", "reward") if name in found] or ["step"]
        return pd.DataFrame(records, columns=[*first, *(n for n in found if n not in first)])

    def tidy(self, **facts: Any) -> Any:
        """DataFrame, a row a number.

        ``facts`` (run, seed, source, ...), step, metric, value, unit.
        """
        import pandas as pd

        rows = [
            {**facts, "step": record["step"], "metric": name, "value": value, "unit": unit_of(name)}
            for record in self.records
            for name, value in record.items()
            if name != "step" and not isinstance(value, str)
        ]
        return pd.DataFrame(rows)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        last = f", last step {self.records[-1]['step']}" if self.records else ""
        return f"MetricLog({len(self)} records{last})"


STAGES = tuple(
    name.removeprefix("time/").removesuffix("_s")
    for name in GLOSSARY
    if name.startswith("time/") and name not in ("time/step_s", "time/other_s")
)
"""Stages whose seconds a log reports."""


def _from_spans(spans: list[trace_module.Span], step_s: float) -> dict[str, float]:
    walls = trace_module.wall_s(spans)
    record = {f"time/{stage}_s": walls[stage] for stage in STAGES if stage in walls}
    record["time/other_s"] = max(0.0, step_s - sum(record.values()))
    record["time/step_s"] = step_s
    trained = sum(s.tokens for s in spans if s.stage == "update")
    if trained and step_s > 0:
        devices = max(s.devices for s in spans)
        record["throughput/tokens_per_s"] = trained / step_s
        record["throughput/tokens_per_s_per_device"] = tokens_per_s_per_device(
            trained, seconds=step_s, devices=devices
        )
    return record


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    item = getattr(value, "item", None)
    if item is None or getattr(value, "ndim", 0) != 0:
        raise TypeError(
            f"{name}: got {type(value).__name__} {getattr(value, 'shape', '')}, need a number, a "
            "0-d tensor or a short string. Reduce it first, with .mean() or batch.token_mean."
        )
    return item()


@contextmanager
def timer(stage: str, *, device: Any = "cpu", **facts: Any) -> Iterator[None]:
    """Record a span of this process.

    Waits for the device at both ends, so that the seconds are the work's.
    """
    from rlkit import device as devices

    devices.synchronize(device)
    with trace_module.current().span(stage, **facts):
        yield
        devices.synchronize(device)
