"""Curves over training steps: the reward, the throughput, or any one metric."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from rlkit.glossary import unit_of
from rlkit.viz.frames import (
    Frames,
    as_runs,
    by_seed,
    has_lone_points,
    has_values,
    need_column,
    over_seeds,
    smoothed,
)
from rlkit.viz.style import (
    INK,
    RUN_COLOURS,
    axis_label,
    check_source,
    colour_of,
    label_steps,
    label_y,
    legend_above,
    limit_line,
    new_axes,
)

# Above this size a reward no longer shares an axis with an accuracy of 0 to 1.
SHARED_AXIS_REWARD = 1.5


def plot_metric(
    frame: Frames,
    name: str,
    *,
    target: float | None = None,
    smooth: int = 1,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """One metric over training steps.

    frame: `log.frame()`, one row a step; with a `seed` column the mean over seeds and a band of one
    standard deviation; a dict {name: frame} draws a line a run. target: a dashed line at that
    value. smooth: mean of the last so many steps (every value stays visible, faintly). source:
    "measured", "simulated" or "paper". Returns the axes.
    """
    label = axis_label(name, unit_of(name), *_notes(source, smooth))
    ax = _plot(frame, name, label=label, smooth=smooth, ax=ax)
    _draw_target(ax, target)
    return ax


def plot_reward(
    frame: Frames,
    *,
    target: float | None = None,
    smooth: int = 1,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """Mean reward over training steps and, where it was evaluated, `eval/accuracy` as dots.

    Arguments as in `plot_metric`. The accuracy has the reward's axis, or one of its own at the
    right where rewards are larger than 1.5.
    """
    notes = _notes(source, smooth)
    evaluated = {
        name: pd.Series(over_seeds(by_seed(run, "eval/accuracy")).dropna())
        for name, run in as_runs(frame).items()
        if has_values(run, "eval/accuracy")
    }
    label = axis_label("reward", unit_of("reward"), *notes)
    ax = _plot(frame, "reward", label=label, smooth=smooth, ax=ax, lone_name=bool(evaluated))
    largest = max(by_seed(run, "reward").abs().max(axis=None) for run in as_runs(frame).values())
    own_axis = bool(evaluated) and largest > SHARED_AXIS_REWARD
    if evaluated:
        _add_accuracy(
            ax,
            evaluated,
            colours=_run_colours(frame, "eval/accuracy"),
            notes=notes,
            own_axis=own_axis,
        )
    _draw_target(ax, target, inside=own_axis)
    return ax


def plot_throughput(
    frame: Frames,
    *,
    per_device: bool = False,
    target: float | None = None,
    smooth: int = 1,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """Tokens a second over training steps, of the whole run or per device; the axis starts at 0.

    Other arguments as in `plot_metric`.
    """
    name = "throughput/tokens_per_s" + ("_per_device" if per_device else "")
    advice = f"Pass per_device={not per_device}, or log it with log.add(step, {{{name!r}: ...}})."
    for run in as_runs(frame).values():
        need_column(run, name, advice)
    label = axis_label("throughput", unit_of(name), *_notes(source, smooth))
    ax = _plot(frame, name, label=label, smooth=smooth, ax=ax)
    ax.set_ylim(bottom=0)
    _draw_target(ax, target)
    return ax


def _notes(source: str, smooth: int) -> list[str]:
    """What a label says after the unit: where the numbers come from, and their smoothing."""
    notes = [check_source(source)]
    return notes if smooth == 1 else [*notes, f"mean of last {smooth} steps"]


def _draw_target(ax: Axes, target: float | None, *, inside: bool = False) -> None:
    if target is not None:
        limit_line(ax, target, f"target {target:g}", inside=inside)


def _plot(
    frame: Frames,
    name: str,
    *,
    label: str,
    smooth: int,
    ax: Axes | None,
    lone_name: bool = False,
) -> Axes:
    """The line or lines of one metric, the labels of its axes, its legend.

    The input is turned into tables before the axes are made, so that bad input leaves no figure.
    lone_name: whether the legend names the line of a lone run, too.
    """
    tables = {run: by_seed(table, name) for run, table in as_runs(frame).items()}
    lines = {run: (table, smoothed(table, smooth)) for run, table in tables.items()}
    ax = new_axes(ax)
    colours = _run_colours(frame, name)
    for run, (table, smooth_table) in lines.items():
        if smooth > 1:
            _line(ax, over_seeds(table), colour=colours[run], label=None, faint=True)
        _band(ax, smooth_table, colours[run])
        text = _legend_text(run or (name if lone_name else ""), smooth_table)
        _line(ax, over_seeds(smooth_table), colour=colours[run], label=text)
    label_y(ax, label)
    label_steps(ax)
    legend_above(ax)
    return ax


def _run_colours(frame: Frames, name: str) -> dict[str, str]:
    """Colour by run: of the metric's meaning for one run, one each for several."""
    runs = as_runs(frame)
    if len(runs) == 1:
        return {run: colour_of(name) for run in runs}
    return {run: RUN_COLOURS[place % len(RUN_COLOURS)] for place, run in enumerate(runs)}


def _legend_text(title: str, table: pd.DataFrame) -> str | None:
    """What the legend says of a line: its name and its number of seeds; None if neither."""
    if table.shape[1] < 2:
        return title or None
    counts = table.notna().sum(axis=1)
    low, high = int(counts[counts > 0].min()), int(counts.max())
    count = f"{high}" if low == high else f"{low} to {high}"
    text = f"mean ± std, n = {count} seeds"
    return f"{title} ({text})" if title else text


def _line(
    ax: Axes, values: pd.Series, *, colour: str, label: str | None, faint: bool = False
) -> None:
    """A line with gaps where values miss; dots joined over the gaps where values are rare."""
    marker = "o" if len(values) == 1 else None
    if has_lone_points(values):
        values, marker = values.dropna(), "o"
    ax.plot(
        values.index,
        values,
        color=colour,
        marker=marker,
        markersize=3.5,
        label=label,
        linewidth=1.0 if faint else 1.8,
        alpha=0.35 if faint else 1.0,
    )


def _band(ax: Axes, table: pd.DataFrame, colour: str) -> None:
    """Mean plus and minus one standard deviation over the seeds, where there are two or more."""
    if table.shape[1] < 2:
        return
    mean, spread = over_seeds(table), pd.Series(table.std(axis=1))
    band = pd.DataFrame({"low": mean - spread, "high": mean + spread}).dropna()
    ax.fill_between(band.index, band["low"], band["high"], color=colour, alpha=0.2, linewidth=0)


def _add_accuracy(
    ax: Axes,
    accuracies: dict[str, pd.Series],
    *,
    colours: dict[str, str],
    notes: list[str],
    own_axis: bool,
) -> None:
    """Dots of eval/accuracy by run, on the reward's axes or on a second y axis at the right."""
    unit = unit_of("eval/accuracy")
    dots = ax
    if own_axis:
        dots = ax.twinx()
        dots.grid(visible=False)
        dots.spines[["top", "left"]].set_visible(False)
        dots.spines["right"].set_visible(True)
        dots.set_ylim(-0.03, 1.03)
        label_y(dots, axis_label("evaluation accuracy", unit, notes[0]))
    else:
        quantity = f"reward [{unit_of('reward')}], accuracy"
        label_y(ax, axis_label(quantity, unit, *notes))
    for run, values in accuracies.items():
        dots.plot(values.index, values, "o:", color=colours[run], markersize=4, linewidth=1)
    key_colour = colours[next(iter(accuracies))] if len(colours) == 1 else INK
    dots.plot([], [], "o:", color=key_colour, markersize=4, label="evaluation accuracy")
    legend_above(ax, *([dots] if own_axis else []))
