"""What a simulated run leaves: the trace and metric frames of a real one, and totals."""

from dataclasses import asdict, dataclass
from typing import Any

from rlkit.metrics import MetricLog
from rlkit.sim import cost
from rlkit.sim.engine import Engine
from rlkit.sim.memory import Memory
from rlkit.sim.moves import moved
from rlkit.sim.work import CALIBRATED, FITTED, SOURCED, Costs, Run
from rlkit.trace import Span, Trace


class Recorder:
    """Collects spans and one record a train step while events happen."""

    def __init__(self, run: Run, memory: Memory) -> None:
        self.run = run
        self.spans: list[Span] = []
        self.records: list[dict[str, float]] = []
        self.dropped_tokens = 0.0
        self.trained_rows = 0
        self._looks = {name: _look(getattr(memory, name)) for name in ("generate", "update")}
        self._step_start_s = self._free_s = 0.0  # of the step; when the trainer was last free
        self._decoded: dict[int, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._stages: dict[str, float] = {}
        self._tokens = 0.0
        self._rows = 0
        self._late: list[int] = []

    def generated(self, where: int, engine: Engine, now_s: float, version: int) -> None:
        """An engine has no rows left, or stops for new weights."""
        tokens = engine.decoded - self._decoded.get(where, 0.0)
        self._decoded[where] = engine.decoded
        facts = {"tokens": int(tokens), "version": version, "look": "generate"}
        self._span("generate", engine.busy_since_s, now_s, f"rollout/{where}", facts)

    def loaded(
        self, where: int, begin_s: float, load_s: float, again_s: float, version: int
    ) -> None:
        """An engine loads weights, then computes its cache again."""
        worker, facts = f"rollout/{where}", {"version": version}
        loaded_s = begin_s + load_s
        self._span("reshard", begin_s, loaded_s, worker, facts)
        self._span("reshard/kv_recompute", loaded_s, loaded_s + again_s, worker, facts)

    def trained(
        self, start_s: float, stages: dict[str, float], *, tokens: float, rows: int, late: list[int]
    ) -> None:
        """The trainer has taken a piece of a step: stages one after the other."""
        self._wait(start_s)
        end_s = start_s
        for stage, seconds in stages.items():
            facts = {"tokens": int(tokens), "rows": rows, "look": "update"}
            self._span(stage, end_s, end_s + seconds, "actor/0", facts)
            self._add(stage, seconds)
            end_s += seconds
        self._tokens += tokens
        self._rows += rows
        self._late += late
        self._free_s = end_s

    def stepped(self, now_s: float, moved_s: float, version: int) -> None:
        """A train step ends with the move of weights, for which generation may have to end."""
        self._wait(now_s)
        self._span("reshard", now_s, now_s + moved_s, "actor/0", {"version": version})
        self._add("reshard", moved_s)
        self._free_s = now_s + moved_s
        step_s = self._free_s - self._step_start_s
        rate = self._tokens / step_s
        self.records.append(
            {
                "step": version - 1,
                "response/length_mean_tokens": self._tokens / self._rows
                - self.run.workload.prompt_tokens,
                "staleness/head_steps": sum(self._late) / len(self._late),
                "staleness/max_steps": max(self._late),
                "time/dock_s": self._stages.pop("dock", 0.0),
                **{f"time/{stage}_s": seconds for stage, seconds in self._stages.items()},
                "time/step_s": step_s,
                "throughput/tokens_per_s": rate,
                "throughput/tokens_per_s_per_device": rate / self.run.num_devices,
            }
        )
        self.trained_rows += self._rows
        self._step_start_s = self._free_s
        self._begin()

    def _wait(self, until_s: float) -> None:
        self._add("generate", until_s - self._free_s)
        self._span("wait/generate", self._free_s, until_s, "actor/0", {})

    def _add(self, stage: str, seconds: float) -> None:
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds

    def _span(
        self, stage: str, start_s: float, end_s: float, worker: str, facts: dict[str, Any]
    ) -> None:
        if end_s <= start_s:
            return
        look = self._looks.get(facts.pop("look", ""))
        memory = dict.fromkeys(("before", "after", "peak"), look) if look else {}
        devices = self.run.num_devices
        self.spans.append(
            Span(stage=stage, start_s=start_s, end_s=end_s, worker=worker, devices=devices,
                 node="simulated", **facts, **memory)
        )  # fmt: skip


def _look(parts: dict[str, float]) -> dict[str, int]:
    """Bytes by category as a trace has them; host memory is not the device's."""
    found = {name: int(size) for name, size in parts.items() if size}
    allocated = sum(size for name, size in found.items() if name != "host_swap")
    return found | {"allocated": allocated, "residual": 0}


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run. All its numbers are simulated."""

    run: Run
    memory: Memory
    log: MetricLog
    trace: Trace
    out_of_memory: str
    """Why it does not fit: phase, need and limit; empty if it does. Nothing ran then."""
    warm_up: int
    """Steps before the steady state, left out of the means below."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a train step; NaN if the run does not fit."""
        return self.mean("time/step_s")

    @property
    def tokens_per_s(self) -> float:
        """Prompt + response tokens of trained samples over the time of their steps."""
        steps = self.log.records[self.warm_up :]
        tokens = sum(step["throughput/tokens_per_s"] * step["time/step_s"] for step in steps)
        return tokens / len(steps) / self.step_s if steps else float("nan")

    @property
    def tokens_per_s_per_device(self) -> float:
        """The same over all devices; a card may have several."""
        return self.tokens_per_s / self.run.num_devices

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps after the warm-up; NaN if there are none."""
        values = [record.get(name, 0.0) for record in self.log.records[self.warm_up :]]
        return sum(values) / len(values) if values else float("nan")

    def frame(self) -> Any:
        """DataFrame of metrics, a row a step: ``MetricLog.frame``."""
        return self.log.frame()

    def bounds(self) -> Any:
        """DataFrame, a row a stage of a mean step: lower_s, seconds, upper_s.

        Everything overlaps, the estimate, nothing overlaps. ``decode_step`` is one token of a full
        engine.
        """
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        run, sequences = self.run, self.run.workload.sequences
        tokens, squares = (sequences * each for each in run.moments)
        rows = min(self.memory.max_rows, -(-sequences // max(1, run.num_engines)))
        stages = {
            "decode_step": cost.decode_step(run, rows, rows * run.moments[0] / 2),
            "logprobs": cost.logprobs(run, tokens, squares, sequences),
            "update": cost.update(run, tokens, squares, sequences),
            "dock": moved(run, "dock").cost,
            "reshard": moved(run, "reshard").cost,
        }
        return pd.DataFrame(
            [(name, each.lower_s, each.seconds, each.upper_s) for name, each in stages.items()],
            columns=["stage", "lower_s", "seconds", "upper_s"],
        )

    def __repr__(self) -> str:
        weights = f"{self.run.counts.parameters / 1e9:.1f}B weights"
        what = f"{weights} on {self.run.num_devices} {self.run.node.device.name}"
        if self.out_of_memory:
            return f"Simulation({what}: out of memory, {self.out_of_memory})"
        return f"Simulation({what}: {self.step_s:.1f} s a step, {self.tokens_per_s:,.0f} tokens/s)"


def collect(run: Run, memory: Memory, out: Recorder | None, *, warm_up: int) -> Simulation:
    """A run's records as a log and a trace; without ``out`` it did not fit."""
    trace = Trace(limit=max(1, len(out.spans) if out else 1))
    log = MetricLog(trace=trace)
    if out:
        for span in sorted(out.spans, key=lambda span: (span.start_s, span.worker)):
            trace.add(span)
        log.records.extend(out.records)
    return Simulation(run, memory, log, trace, "" if out else memory.problem, warm_up)


def constants(run: Run) -> Any:
    """DataFrame of every number that a run takes on trust: name, value, kind, source.

    Kinds: ``source``, a public one; ``fitted``, by ``rk.sim.fit`` or a study; ``assumed``, what
    ``Costs()`` has by itself too.
    """
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    rows: list[tuple[str, float, str, str]] = []
    for part, item in (("device", run.node.device), ("node", run.node)):
        for name, value in asdict(item).items():
            if isinstance(value, float):
                assumed = name in item.assumed
                kind, source = ("assumed", "") if assumed else ("source", item.source)
                rows.append((f"{part}.{name}", value, kind, source))
    for name, value in asdict(run.costs).items():
        fitted = name in FITTED + CALIBRATED and value != getattr(Costs(), name)
        kind = "fitted" if fitted else "source" if name in SOURCED else "assumed"
        rows.append((f"costs.{name}", value, kind, SOURCED.get(name, "")))
    return pd.DataFrame(rows, columns=["name", "value", "kind", "source"])
