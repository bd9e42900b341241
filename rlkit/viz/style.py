"""One look for every figure: colours by meaning, units in the labels, limit lines with a name."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.ticker import MaxNLocator

FIGURE_SIZE_IN = (7.0, 3.2)
SOURCES = ("measured", "simulated", "paper")
LABEL_CHARS = 36  # that fit along the height of a figure
LEGEND_CHARS_PER_IN = 15.0
LEGEND_KEY_CHARS = 7  # width of a legend's coloured key and the space around it
INK = "#4d4f57"

# Colours of petroff10 (Petroff, 2107.02270, chosen for colour-blind readers), for runs side by
# side: those that stand out on white as a line come first.
RUN_COLOURS = (
    "#3f90da",
    "#e76300",
    "#832db6",
    "#717581",
    "#bd1f01",
    "#a96b59",
    "#ffa90e",
    "#94a4a2",
)

ROLE_COLOURS = {
    "rollout": "#3f90da",
    "actor": "#e76300",
    "critic": "#832db6",
    "reference": "#a96b59",
    "reward": "#bd1f01",
    "evaluation": INK,
}

# A phase has the colour of the worker that is busy in it, the lesser of a worker's two phases a
# lighter one; stacking follows this order.
PHASE_COLOURS = {
    "generate": ROLE_COLOURS["rollout"],
    "score": ROLE_COLOURS["reward"],
    "logprobs": "#ffa90e",
    "ref_logprobs": ROLE_COLOURS["reference"],
    "values": "#b98fd6",
    "update": ROLE_COLOURS["actor"],
    "critic_update": ROLE_COLOURS["critic"],
    "reshard": "#92dadd",
    "evaluate": ROLE_COLOURS["evaluation"],
    "other": "#c9cdd3",
}
SPARE_PHASE_COLOURS = ("#b9ac70", "#717581", "#94a4a2")

AREA_COLOURS = {
    "reward": ROLE_COLOURS["reward"],
    "policy": ROLE_COLOURS["actor"],
    "actor": ROLE_COLOURS["actor"],
    "critic": ROLE_COLOURS["critic"],
    "eval": ROLE_COLOURS["evaluation"],
}


def _style_rc() -> dict[Any, Any]:
    """The rc parameters of the look: the petroff10 cycle (matplotlib >= 3.10) and our frame."""
    base = "petroff10" if "petroff10" in plt.style.library else "tableau-colorblind10"
    return dict(plt.style.library[base]) | {
        "figure.figsize": FIGURE_SIZE_IN,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
    }


def use_style() -> None:
    """Make every later figure of this process look like rlkit's own.

    A legend stands above its axes; for a title use `ax.figure.suptitle`, which stays clear of it.
    """
    plt.rcParams.update(_style_rc())


@contextmanager
def in_style() -> Iterator[None]:
    """Figures made inside look like rlkit's own, those after it as before."""
    with plt.rc_context(_style_rc()):
        yield
        shown = matplotlib.is_interactive()  # the first figure of a kernel may switch it on,
    matplotlib.interactive(shown)  # and leaving the context would switch it off for good


def new_axes(ax: Axes | None = None) -> Axes:
    """The axes to draw on: `ax` itself, or those of a new figure in rlkit's style."""
    if ax is None:
        with in_style():
            return plt.subplots(figsize=FIGURE_SIZE_IN, layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise TypeError(
            f"ax: got {type(ax).__name__}, need a matplotlib Axes. "
            "Pass one of `fig, axes = plt.subplots(...)`, or leave it out for a new figure."
        )
    return ax


def axis_label(quantity: str, unit: str, *notes: str) -> str:
    """`reward [1], measured`: what an axis shows, its unit, and notes."""
    return ", ".join([f"{quantity} [{unit}]", *notes])


def check_source(source: str) -> str:
    """The source itself, if it is one of the three; ValueError otherwise."""
    if source not in SOURCES:
        raise ValueError(
            f"source: got {source!r}, need one of {', '.join(SOURCES)}. "
            "Every figure says where its numbers come from."
        )
    return source


def colour_of(name: str) -> str:
    """Colour of a metric by what it speaks of: its phase or its worker."""
    area, _, rest = name.partition("/")
    if area == "time":
        return PHASE_COLOURS.get(rest.removesuffix("_s"), ROLE_COLOURS["rollout"])
    return AREA_COLOURS.get(area, ROLE_COLOURS["rollout"])


def label_y(ax: Axes, label: str) -> None:
    """Name the y axis, in several lines if the label is longer than the axis."""
    ax.set_ylabel("\n".join(textwrap.wrap(label, LABEL_CHARS, break_on_hyphens=False)))


def label_steps(ax: Axes) -> None:
    """Name the x axis: training steps, ticks at whole numbers."""
    ax.set_xlabel(axis_label("step", "train steps"))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def stacked_bars(ax: Axes, table: pd.DataFrame, colours: list[str], *, width: float = 0.8) -> None:
    """A bar a row, its name below it, and a colour a column; what is negative hangs below zero."""
    places, bottom = range(len(table)), np.zeros(len(table))
    look = {"width": width, "edgecolor": "white", "linewidth": 0.6}  # edges keep neighbours apart
    for name, colour in zip(table.columns, colours, strict=True):
        sizes = table[name].to_numpy(float)
        starts = np.where(sizes < 0, 0.0, bottom)
        ax.bar(places, sizes, bottom=starts, color=colour, label=name, **look)
        bottom += np.maximum(sizes, 0.0)
    ax.set_xticks(places, list(table.index))


def limit_line(ax: Axes, value: float, label: str, *, inside: bool = False) -> None:
    """A dashed horizontal line with its name at its right end: beside the axes, or inside them."""
    ax.axhline(value, color=INK, linestyle="--", linewidth=1.0, zorder=1.5)
    look = {"ha": "right", "va": "bottom"} if inside else {}
    write_beside(ax, value, label, offset=(-2, 2) if inside else (4, 0), **look)


def write_beside(
    ax: Axes, y: float, text: str, *, offset: tuple[float, float] = (5, 0), **look: Any
) -> None:
    """Small text at the right end of the axes, at a height in data, `offset` points from there."""
    look = {"va": "center", "fontsize": "small", "color": INK} | look
    ax.annotate(
        text, (1.0, y), xycoords=("axes fraction", "data"), xytext=offset,
        textcoords="offset points", **look,
    )  # fmt: skip


def legend_above(ax: Axes, *others: Axes) -> None:
    """A legend above the axes, of every labelled artist of all axes, bars first."""
    entries = []
    for axes in (ax, *others):
        entries += zip(*axes.get_legend_handles_labels(), strict=True)
    entries.sort(key=lambda entry: not isinstance(entry[0], BarContainer))
    if entries:
        labels = [label for _, label in entries]
        ax.legend(
            [handle for handle, _ in entries],
            labels,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=_columns_that_fit(labels, _width_in(ax) * LEGEND_CHARS_PER_IN),
            frameon=False,
            fontsize="small",
            borderaxespad=0.2,
            columnspacing=1.4,
            handlelength=1.6,
        )


def _width_in(ax: Axes) -> float:
    """Width of the axes; the final layout is not known yet, so a lone column counts as 88 %."""
    place = ax.get_subplotspec()
    alone = place is not None and place.get_gridspec().ncols == 1
    figure_in = ax.figure.bbox.width / ax.figure.dpi  # of a subfigure, too
    return figure_in * (0.88 if alone else ax.get_position().width)


def _columns_that_fit(labels: list[str], num_chars: float) -> int:
    """Most columns whose widest labels fit side by side; matplotlib fills column by column."""
    for columns in range(len(labels), 1, -1):
        cells = np.array_split([len(label) + LEGEND_KEY_CHARS for label in labels], columns)
        if sum(max(cell) for cell in cells) <= num_chars:
            return columns
    return 1
