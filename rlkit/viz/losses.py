"""What losses do to the tokens of one frozen batch: a heat map with the numbers of each beside."""

from __future__ import annotations

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.patches import Patch

from rlkit.viz.style import INK, new_axes, write_beside

COLUMNS = ("objective", "loss", "uid", "token", "advantage", "gradient", "clipped")
HEADINGS = ("loss", "|gradient|", "clipped")
CLIPPED = INK
COLUMN_WIDTH = 52  # of the numbers, in points: constrained layout then knows the room they need


def loss_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """A row an objective of `rk.algo.compare_losses(...)`, in the order of the comparison.

    loss; gradient_norm, the L2 norm of d loss / d logprob over all tokens; gradient_max, its
    largest magnitude; clipped_fraction, the share of tokens without gradient though they have an
    advantage; num_tokens.
    """
    _check(frame)
    size = frame.assign(square=frame["gradient"] ** 2, magnitude=frame["gradient"].abs())
    summary = size.groupby("objective", sort=False).agg(
        loss=("loss", "first"),
        gradient_norm=("square", "sum"),
        gradient_max=("magnitude", "max"),
        clipped_fraction=("clipped", "mean"),
        num_tokens=("token", "size"),
    )
    summary["gradient_norm"] = np.sqrt(summary["gradient_norm"])
    return pd.DataFrame(summary)


def plot_losses(frame: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Heat map of d loss / d logprob, a row an objective and a column a token, numbers beside it.

    frame: what `rk.algo.compare_losses(...)` returns. Blue pushes a token's probability up, red
    down, on one scale for all rows; dark grey is clipped: no gradient though there is an advantage.
    White lines part responses. The numbers are those of `loss_summary`. Returns the axes.
    """
    summary = loss_summary(frame)
    ax = new_axes(ax)
    table = frame.pivot(index="objective", columns=["uid", "token"], values=["gradient", "clipped"])
    table = table.loc[list(summary.index)].sort_index(axis=1)
    pull = -table["gradient"].to_numpy(float)  # [objectives, tokens]
    clipped = table["clipped"].to_numpy(bool)
    uids = np.array([uid for uid, _ in table["gradient"].columns])
    limit = float(np.abs(pull).max()) or 1.0
    colours = matplotlib.colormaps["RdBu"].with_extremes(bad=CLIPPED)
    image = ax.imshow(
        np.ma.masked_where(clipped, pull),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=Normalize(-limit, limit),
    )
    starts = np.flatnonzero(np.diff(uids)) + 0.5
    ax.vlines(
        starts, -0.5, len(summary) - 0.5, color="white", linewidth=2 if len(starts) < 40 else 0.5
    )
    ax.hlines(np.arange(1, len(summary)) - 0.5, -0.5, pull.shape[1] - 0.5, color="white")
    ax.grid(visible=False)
    ax.set_yticks(range(len(summary)), [str(name) for name in summary.index])
    ax.set_xlabel("trainable token, response after response")
    _numbers(ax, summary)
    bar = ax.figure.colorbar(image, ax=ax, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("−d loss / d logprob [1]")
    if clipped.any():
        patch = Patch(color=CLIPPED, label="clipped: no gradient")
        ax.legend(
            handles=[patch], loc="lower left", bbox_to_anchor=(0, 1), fontsize="small",
            borderaxespad=0.2, frameon=False,
        )  # fmt: skip
    plt.setp(ax.spines.values(), visible=False)
    return ax


def _numbers(ax: Axes, summary: pd.DataFrame) -> None:
    """Columns of numbers at the right of the heat map, one line a row of it."""
    shown = summary[["loss", "gradient_norm", "clipped_fraction"]].to_numpy(float).tolist()
    cells = [(f"{a + 0.0:.3g}".replace("-", "−"), f"{b:.3g}", f"{c:.0%}") for a, b, c in shown]
    for line, row in enumerate([HEADINGS, *cells], start=-1):
        for column, text in enumerate(row, start=1):
            place = (column * COLUMN_WIDTH, 0)
            write_beside(ax, line, text, offset=place, ha="right", annotation_clip=False)


def _check(frame: object) -> None:
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"frame: got {type(frame).__name__}, need a pandas DataFrame. "
            "Pass what rk.algo.compare_losses(batch, losses) returns."
        )
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent or frame.empty:
        raise ValueError(
            f"frame: got {len(frame)} rows without {absent or 'tokens'}, need a row an objective "
            "and token. Pass what rk.algo.compare_losses(batch, losses) returns."
        )
    counts = frame["objective"].value_counts(sort=False).to_dict()
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"frame: got {counts} tokens by objective, need equally many: all losses on "
            "one batch. Compare them in one call."
        )
