"""Real runs of 061's workload in one process, and the same runs simulated."""

import importlib.util
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit.metrics import unit_of
from rlkit.sim import specs

PARTS = Path(__file__).resolve().parent.parent / "061_async_speedup" / "parts.py"
spec = importlib.util.spec_from_file_location("parts_of_061", PARTS)
long_tailed = sys.modules["parts_of_061"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(long_tailed)

PROMPT = 8  # tokens of a prompt of reverse_digits(length=6)
MEDIAN, LONGEST = 16, 112  # tokens of a response, lognormal with sigma 1: 061's setting
SAMPLES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run: its batch, who works beside whom, how stale samples may be."""

    size: int
    """Prompts a step."""
    max_staleness: int | None = None
    """None: synchronous, one thread; else one thread generates and one trains."""

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.max_staleness is None:
            return f"in turns, {self.size} prompts"
        return f"beside each other, {self.size} prompts, staleness {self.max_staleness}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Laptop:
    """How much is measured."""

    repeats: int = 8
    """Of all runs, each in an order of its own."""
    steps: int = 6
    """Train steps a run; the first is not counted."""


CALIBRATION = (Case(size=4), Case(size=16), Case(size=8, max_staleness=2))
"""What the fit sees."""
PREDICTED = (
    Case(size=8),
    Case(size=32),
    Case(size=8, max_staleness=0),
    Case(size=8, max_staleness=4),
    Case(size=16, max_staleness=1),
    Case(size=4, max_staleness=2),
)
"""What it must predict: batch, staleness and who works beside whom are changed."""


def measure(case: Case, *, steps: int, repeat: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One real run: spans and tidy metrics, both without the first step."""
    together = case.max_staleness is None
    setting = long_tailed.Setting(
        steps=steps, size=case.size, n=SAMPLES, median_tokens=MEDIAN, longest_tokens=LONGEST,
        devices=1 if together else 2, max_staleness=case.max_staleness or 0,
        slice_s=0.01,  # a step of training takes 50 ms and more
    )  # fmt: skip
    name, trace, ends, tokens = "synchronous" if together else "asynchronous", rk.Trace(), [], []
    load = os.getloadavg()[0]
    with (
        rk.trace.use(trace),
        rk.launch(backend="local", devices="cpu", seed=repeat) as cluster,
    ):
        for record in long_tailed.train(name, cluster, setting, seed=repeat):
            ends.append(time.time())
            tokens.append(float(record["batch"].num_tokens.sum()))
    spans, seconds = trace.frame(), ends[-1] - ends[0]
    spans = spans[(spans["start_s"] >= ends[0]) & (spans["end_s"] <= ends[-1])]
    found = {
        "throughput/tokens_per_s": sum(tokens[1:]) / seconds,
        "time/step_s": seconds / (steps - 1),
        "load/1min_mean": (load + os.getloadavg()[0]) / 2,
    }
    return spans, tidy(case, found, seed=repeat, source="measured")


def tidy(case: Case, found: dict[str, float], *, seed: int, source: str) -> pd.DataFrame:
    """Metrics of a run as rows of results.csv."""
    rows = [
        {"metric": name, "value": value, "unit": unit_of(name)} for name, value in found.items()
    ]
    facts = {"run": case.name, "system": "rlkit", "model": "tiny-0.23M", "seed": seed, "step": 0}
    return pd.DataFrame(rows).assign(**facts, devices=described(case).num_devices, source=source)


def described(case: Case) -> rk.sim.Run:
    """The same run for the simulator; its machine is not known yet."""
    lengths = rk.sim.Lengths.of_median(MEDIAN, sigma=1.0, limit_tokens=LONGEST, between=0.0)
    both = case.max_staleness is not None
    return rk.sim.Run(
        model=rk.models.tiny().spec,
        node=specs.NODE_CPU,
        num_devices=1 + both,
        rollout_devices=int(both),
        workload=rk.sim.Workload(
            prompts=case.size, samples=SAMPLES, prompt_tokens=PROMPT, lengths=lengths
        ),
        recompute=False,
    )


def simulate(case: Case, fitted: rk.sim.Run, *, steps: int, seeds: int = 8) -> dict[str, float]:
    """Throughput and step of a case at the fitted rates, counted as ``measure`` counts."""
    known = described(case)
    run = replace(
        known, node=fitted.node, costs=fitted.costs, dock=fitted.dock, reshard=fitted.reshard
    )
    schedule = rk.sim.synchronous()
    if case.max_staleness is not None:
        schedule = rk.sim.asynchronous(max_staleness=case.max_staleness)
    frames = [rk.sim.simulate(run, schedule, steps=steps, seed=s).frame() for s in range(seeds)]
    counted = pd.concat([frame.iloc[1:] for frame in frames])
    seconds = counted["time/step_s"]
    tokens = (counted["throughput/tokens_per_s"] * seconds).sum()
    return {"throughput/tokens_per_s": tokens / seconds.sum(), "time/step_s": seconds.mean()}
