"""Figures without a screen, none kept; a log on which time is what the test says."""

import io
from collections.abc import Callable
from types import SimpleNamespace

import IPython
import matplotlib
import matplotlib.pyplot as plt
import pandas as pd
import pytest

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    plt.close("all")


def make_frame(num_steps: int = 20, *, offset: float = 0.0) -> pd.DataFrame:
    """A log's frame: reward step / 10 + offset, steps of 1 s with 0.8 s in named phases."""
    steps = range(num_steps)
    return pd.DataFrame(
        {
            "step": steps,
            "reward": [step / 10 + offset for step in steps],
            "eval/accuracy": [step / 100 if step % 5 == 4 else float("nan") for step in steps],
            "time/generate_s": 0.5,
            "time/update_s": 0.3,
            "time/step_s": 1.0,
            "throughput/tokens_per_s": 1000.0,
            "actor/loss_hash": "0123456789ab",
        }
    )


@pytest.fixture
def frame():
    return make_frame()


@pytest.fixture
def seeds():
    """Three seeds whose rewards differ by 1 from one to the next."""
    return pd.concat([make_frame(offset=seed).assign(seed=seed) for seed in range(3)])


@pytest.fixture
def in_notebook(monkeypatch):
    """As in a Jupyter kernel: widgets live without a front end."""
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=object()))


class Planned:
    """One planned call of a `Timeline`."""

    def __init__(self, due_s: float, function: Callable[[], None]) -> None:
        self.due_s, self.function, self.cancelled = due_s, function, False

    def cancel(self) -> None:
        self.cancelled = True


class Timeline:
    """A clock that moves when told to, and makes the planned calls it passes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planned: list[Planned] = []

    def clock(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, function: Callable[[], None]) -> Planned:
        self.planned.append(Planned(self.now_s + delay_s, function))
        return self.planned[-1]

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while due := [p for p in self.planned if p.due_s <= end_s and not p.cancelled]:
            first = min(due, key=lambda planned: planned.due_s)
            self.planned.remove(first)
            self.now_s = max(self.now_s, first.due_s)
            first.function()
        self.planned = [p for p in self.planned if not p.cancelled]
        self.now_s = end_s


@pytest.fixture
def timeline():
    return Timeline()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal():
    return Terminal()
