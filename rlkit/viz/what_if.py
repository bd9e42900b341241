"""Sliders over a simulated run: timeline, throughput and memory of each choice."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, Protocol

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlkit.viz.kernel import html_widget
from rlkit.viz.memory import GIB, plot_memory
from rlkit.viz.style import ROLE_COLOURS, axis_label, limit_line
from rlkit.viz.timeline import plot_timeline

SIZE_IN = (10.0, 6.4)
MOSAIC: list[Any] = [["lanes", "lanes"], ["tried", "memory"]]
# Places are fixed: a layout engine would draw everything twice at each move.
PLACES = {"left": 0.09, "right": 0.93, "bottom": 0.08, "top": 0.94, "hspace": 0.5, "wspace": 0.22}
MOST_ENGINES = 4  # lanes of a timeline; all engines do the same
SHOWN = 0.5  # of the simulated time: its end, where the run is steady


class Simulated(Protocol):
    """What ``rk.sim.simulate`` returns, as far as it is drawn."""

    trace: Any
    memory: Any
    out_of_memory: str
    step_s: float
    tokens_per_s: float


class WhatIf:
    """A run simulated again at each move of a slider.

    simulate: a function of the names in ``over``, such as ``lambda **fields: rk.sim.simulate(
    *rk.sim.change(run, schedule, **fields))``; over: the values that each slider takes. Show it by
    its name at the end of a cell. ``choose(max_staleness=4)`` moves sliders from code, and works
    without a notebook. ``seconds`` is what the last redrawing took, the simulation included.
    """

    def __init__(
        self, simulate: Callable[..., Simulated], over: Mapping[str, Sequence[Any]]
    ) -> None:
        empty = [name for name, values in over.items() if not len(values)]
        if not over or empty:
            raise ValueError(f"over: got no values for {empty or 'any name'}, need some for each.")
        self._simulate, self._over = simulate, {name: list(over[name]) for name in over}
        self.chosen = {name: values[0] for name, values in self._over.items()}
        self.tried: list[dict[str, Any]] = []
        self.page = html_widget()
        self.sliders: dict[str, Any] = {}
        self.widget: Any = None
        self._figure = Figure(figsize=SIZE_IN)
        self._axes = self._figure.subplot_mosaic(
            MOSAIC, height_ratios=[1.3, 1.0], gridspec_kw=PLACES
        )
        if self.page is not None:
            self._make_widgets()
        self._draw()

    def choose(self, **values: Any) -> Simulated:
        """Simulate and draw with these values in place of the present ones."""
        for name, value in values.items():
            if name not in self._over:
                raise ValueError(f"choose: got {name!r}, need some of {list(self._over)}.")
            if value not in self._over[name]:
                raise ValueError(f"choose: got {name}={value!r}, need one of {self._over[name]}.")
        self.chosen |= values
        self._draw()
        return self.found

    def frame(self) -> pd.DataFrame:
        """A row a choice so far: the values, and what came out."""
        return pd.DataFrame(self.tried)

    def _make_widgets(self) -> None:
        import ipywidgets

        self.sliders = {
            name: ipywidgets.SelectionSlider(
                options=values, description=name, continuous_update=False,
                style={"description_width": "12em"}, layout={"width": "32em"},
            )
            for name, values in self._over.items()
        }  # fmt: skip
        for name, slider in self.sliders.items():
            slider.observe(lambda change, name=name: self.choose(**{name: change["new"]}), "value")
        self.widget = ipywidgets.VBox([*self.sliders.values(), self.page])

    def _draw(self) -> None:
        start_s = time.perf_counter()
        self.found = self._simulate(**self.chosen)
        outcome = {"tokens_per_s": self.found.tokens_per_s, "step_s": self.found.step_s}
        self.tried.append(self.chosen | outcome | {"out_of_memory": self.found.out_of_memory})
        self._png = self._picture()
        if self.page is not None:
            self.page.value = self._html()
        self.seconds = time.perf_counter() - start_s

    def _picture(self) -> bytes:
        axes, png = self._axes, io.BytesIO()
        for each in axes.values():
            each.clear()
        spans = self.found.trace.frame()
        if len(spans):
            plot_timeline(_last(spans), ax=axes["lanes"], source="simulated")
        _plot_tried(axes["tried"], self.frame())
        limit_gib = self.found.memory.limit_bytes / GIB
        plot_memory(
            self.found.memory.frame(),
            ax=axes["memory"],
            source="simulated",
            limit_gib=round(limit_gib, 1),
        )
        self._figure.savefig(png, format="png", dpi=80)
        return png.getvalue()

    def _html(self) -> str:
        picture = base64.b64encode(self._png).decode()
        return f'<pre>{escape(repr(self))}</pre><img src="data:image/png;base64,{picture}">'

    def __repr__(self) -> str:
        chosen = ", ".join(f"{name}={value}" for name, value in self.chosen.items())
        return f"WhatIf({chosen}: {self.found!r})"

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, object]:
        page: dict[str, object] = {"text/plain": repr(self), "text/html": self._html()}
        if self.widget is None:
            return page
        return self.widget._repr_mimebundle_(include=include, exclude=exclude) | page


def _last(spans: Any) -> Any:
    """Spans of the steady end of a run, of a few engines and the trainer."""
    engines = [name for name in spans["worker"].unique() if str(name).startswith("rollout/")]
    engines.sort(key=lambda name: int(name.rpartition("/")[2]))
    few = spans[~spans["worker"].isin(engines[MOST_ENGINES:])]
    first_s = (1 - SHOWN) * few["end_s"].max()
    return few[few["end_s"] > first_s].assign(start_s=lambda each: each["start_s"].clip(first_s))


def _plot_tried(ax: Any, tried: pd.DataFrame) -> None:
    """Throughput of all choices so far, the present one last; nothing where it does not fit."""
    values = tried["tokens_per_s"].fillna(0.0).to_numpy(float)
    ax.bar(range(len(values)), values, color=ROLE_COLOURS["rollout"], alpha=0.5)
    ax.bar([len(values) - 1], values[-1:], color=ROLE_COLOURS["rollout"])
    limit_line(ax, values.max(), "best so far", inside=True)
    ax.set_ylim(0, 1.15 * values.max() if values.max() > 0 else 1)
    ax.set_xlabel("choice")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylabel(axis_label("throughput", "tokens/s", "simulated"))
