"""How far engine and trainer are apart: tokens by the ratio of their probabilities."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from rlkit.glossary import GLOSSARY
from rlkit.viz.frames import Frames, as_runs, need_column
from rlkit.viz.style import RUN_COLOURS, axis_label, check_source, label_y, legend_above, new_axes

BINS = [name for name in GLOSSARY if name.startswith("mismatch") and name.endswith("_fraction")]
LEAST = 1e-6
"""Shares below it, and 0, lie under the axis."""


def plot_mismatch(frame: Frames, *, ax: Axes | None = None, source: str = "measured") -> Axes:
    """Histogram of the ratio of the trainer's to the engine's probability of sampled tokens.

    frame: `log.frame()` of a run with the metrics of `algo.mismatch_metrics`, averaged over its
    steps; a dict {name: frame} draws bars a run, as for two engines side by side. The share of
    tokens is on a logarithmic axis: nearly all lie in the middle. Returns the axes.
    """
    check_source(source)
    runs = as_runs(frame)
    ax = new_axes(ax)
    width = 0.8 / len(runs)
    for number, (name, run) in enumerate(runs.items()):
        for column in BINS:
            need_column(run, column, "Add algo.mismatch_metrics(batch) to the loss's metrics.")
        shares = run[BINS].mean().to_numpy(float)
        left = np.arange(len(BINS)) - 0.4 + (number + 0.5) * width
        colour = RUN_COLOURS[number % len(RUN_COLOURS)]
        ax.bar(left, np.maximum(shares, LEAST / 10), width, color=colour, label=name or None)
    ax.set_yscale("log")
    ax.set_ylim(LEAST, 2)
    ax.set_xticks(range(len(BINS)), [_words(name) for name in BINS])
    ax.set_xlabel(axis_label("probability by the trainer over that by the engine", "1"))
    label_y(ax, axis_label("share of tokens", "1", source))
    if any(runs):
        legend_above(ax)
    return ax


def _words(name: str) -> str:
    """`mismatch/ratio_0.9_to_0.99_fraction` -> `0.9 to 0.99`, in two lines."""
    borders = name.partition("ratio_")[2].removesuffix("_fraction")
    return "\n".join(borders.rsplit("_", 1)).replace("_", " ")
