"""Where a step's seconds go: stacked bars of the phases, with the unexplained rest drawn too."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlkit.checks import whole
from rlkit.viz.frames import Frames, as_runs, has_values, numbers
from rlkit.viz.style import (
    PHASE_COLOURS,
    SPARE_PHASE_COLOURS,
    axis_label,
    check_source,
    label_y,
    legend_above,
    new_axes,
    stacked_bars,
)

STEP_COLUMN = "time/step_s"
AXIS_CHARS = 75  # of tick labels that fit along the width of a figure
OVERLAP_TOLERANCE = 0.02  # a tick nearer than 2 % to the bar's top would only blur it


def phase_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds by phase: one row a row of `frame`, one column a phase, `other` last.

    Phases are the columns `time/<phase>_s` but `time/step_s`; a missing value counts as 0. Each row
    sums to `time/step_s`, since `other` is what the phases leave of it (with whatever was logged as
    `time/other_s`). Where phases overlap, their sum exceeds the step and `other` is 0. Without
    `time/step_s` the sum of the phases is all there is. Rows whose step time is missing are left
    out. Raises ValueError if the frame has neither phases nor a step time.
    """
    names = _phase_names(frame)
    seconds = pd.DataFrame(
        {name: numbers(frame, f"time/{name}_s").fillna(0.0) for name in names}, index=frame.index
    )
    if has_values(frame, STEP_COLUMN):
        step = numbers(frame, STEP_COLUMN)
        parts = seconds.drop(columns="other", errors="ignore")
        rest = step - pd.Series(parts.sum(axis=1))
        seconds = parts.assign(other=rest.clip(lower=0.0)).loc[step.notna()]
    elif not names:
        raise ValueError(
            f"frame: got columns {', '.join(map(str, frame.columns))}, need {STEP_COLUMN!r} or "
            "phases such as 'time/generate_s'. Time the phases and log their seconds."
        )
    return seconds


def _phase_names(frame: pd.DataFrame) -> list[str]:
    """Phases with at least one number, in stacking order."""
    there = [
        str(column).removeprefix("time/").removesuffix("_s")
        for column in frame.columns
        if str(column).startswith("time/")
        and str(column).endswith("_s")
        and column != STEP_COLUMN
        and has_values(frame, column)
    ]
    return _stacking_order(there)


def _stacking_order(names: list[str]) -> list[str]:
    """Known phases as a step runs through them, then those of the frame's own, then "other"."""
    known = [name for name in PHASE_COLOURS if name in names and name != "other"]
    extra = [name for name in names if name not in PHASE_COLOURS]
    return known + extra + (["other"] if "other" in names else [])


def phase_colour(name: str, extra: list[str]) -> str:
    """Colour of a phase; those the style does not know take the spare ones by their order."""
    if name in PHASE_COLOURS:
        return PHASE_COLOURS[name]
    return SPARE_PHASE_COLOURS[extra.index(name) % len(SPARE_PHASE_COLOURS)]


def plot_phases(
    frame: Frames,
    *,
    bars: int = 12,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """Seconds by phase as stacked bars; a bar's height is `time/step_s`, the rest being "other".

    frame: `log.frame()`. Up to `bars` steps are drawn one bar each, more as means over blocks of
    consecutive steps; several seeds are averaged. A dict {name: frame} draws one bar a run, the
    mean over its steps. Where phases overlap in time (asynchronous runs) their sum exceeds the
    step, whose length is then drawn as a black tick. source: "measured", "simulated" or "paper".
    Returns the axes.
    """
    bars = whole("bars", bars, what="bar")
    label = axis_label("time per step", "s", check_source(source))
    runs = as_runs(frame)
    if isinstance(frame, Mapping):
        heights, steps, x_label = _by_run(runs)
    else:
        heights, steps, x_label = _by_block(runs[""], bars)
    ax = new_axes(ax)
    extra = [name for name in heights.columns if name not in PHASE_COLOURS]
    stacked_bars(ax, heights, [phase_colour(name, extra) for name in heights.columns])
    _mark_overlap(ax, heights, steps)
    ax.grid(visible=False, axis="x")
    ax.set_xlabel(x_label)
    label_y(ax, label)
    tallest = np.nanmax([*heights.sum(axis=1), *steps])
    ax.set_ylim(0, 1.05 * tallest if tallest > 0 else 1)
    legend_above(ax)
    return ax


def _by_run(runs: dict[str, pd.DataFrame]) -> tuple[pd.DataFrame, pd.Series, str]:
    """One bar a run: mean seconds by phase, mean step time, and the x axis's label."""
    means = {f"{name}\nn = {len(run)}": phase_seconds(run).mean() for name, run in runs.items()}
    table = pd.DataFrame(means).T.fillna(0.0)
    heights = table.reindex(columns=_stacking_order(list(table.columns)))
    steps = [_step_seconds(run).mean() for run in runs.values()]
    return heights, pd.Series(steps, index=heights.index), "run, mean of n [train steps]"


def _by_block(frame: pd.DataFrame, bars: int) -> tuple[pd.DataFrame, pd.Series, str]:
    """One bar a block of consecutive steps: as `_by_run`."""
    seconds = phase_seconds(frame).assign(_step=_step_seconds(frame), _number=frame["step"])
    means = pd.DataFrame(seconds.groupby("_number", as_index=False).mean())  # over seeds
    size = -(-len(means) // bars)
    blocks = np.arange(len(means)) // size
    number = means.pop("_number").to_numpy(float)
    ranges = [(part[0], part[-1]) for part in np.split(number, np.flatnonzero(np.diff(blocks)) + 1)]
    heights = pd.DataFrame(means.groupby(blocks).mean())
    heights.index = pd.Index(_range_texts(ranges))
    quantity = f"step, mean of blocks of {size}" if size > 1 else "step"
    steps = heights.pop("_step")
    return heights, steps, axis_label(quantity, "train steps")


def _step_seconds(frame: pd.DataFrame) -> pd.Series:
    if has_values(frame, STEP_COLUMN):
        return numbers(frame, STEP_COLUMN)
    return pd.Series(np.nan, index=frame.index)


def _range_texts(ranges: list[tuple[float, float]]) -> list[str]:
    """`8` or `8–15` for each; all in two lines if they would not fit side by side."""
    texts = [f"{a:g}" if a == b else f"{a:g}–{b:g}" for a, b in ranges]
    if len(texts) * max(len(text) for text in texts) > AXIS_CHARS:
        texts = [text.replace("–", "\n–") for text in texts]
    return texts


def _mark_overlap(ax: Axes, heights: pd.DataFrame, steps: pd.Series) -> None:
    """Black ticks at the step's length where the phases together take longer than it."""
    over = (heights.sum(axis=1) > steps * (1 + OVERLAP_TOLERANCE)).to_numpy()
    places = np.flatnonzero(over)
    if len(places):
        ax.hlines(
            steps.to_numpy()[places],
            places - 0.45,
            places + 0.45,
            color="black",
            linewidth=1.8,
            label="whole step (phases overlap)",
        )
