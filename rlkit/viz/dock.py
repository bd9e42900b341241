"""The rows of a transfer dock as a picture: which columns are there, what stages do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rlkit.viz.style import (
    FIGURE_SIZE_IN,
    INK,
    ROLE_COLOURS,
    axis_label,
    check_source,
    in_style,
    label_y,
)

IDENTITY = ("uid", "group", "version", "partition", "bytes")
STATE_COLOURS = {
    "there": "#3f90da",
    "empty": "#eceef1",
    "waiting": "#bcd9f2",
    "consumed": INK,
    "unknown": "white",
}
HOLDER_COLOURS = (ROLE_COLOURS["actor"], ROLE_COLOURS["critic"], "#ffa90e", ROLE_COLOURS["reward"])
OTHERS = "leased by others"
MOST_LINES = 400  # lines of a picture; of more rows a line is the mean of several
MOST_NAMED = 16  # rows whose uids fit beside the picture
NODES_NAMED = 12
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def plot_dock(frame: pd.DataFrame, *, source: str = "measured") -> dict[str, Axes]:
    """Four pictures of a dock: rows x columns, rows x stages, bytes by node, rows by version.

    frame: `dock.frame()`, or some rows of it. A cell of a column is there or empty; one of a stage
    is waiting, leased (a colour for each of the four holders with most rows) or consumed. Of more
    than 400 rows a line is the mean of several: where they differ their colours mix. source:
    "measured", "simulated" or "paper". Returns the axes by name: columns, stages, bytes, versions.
    """
    columns, stages = parts_of(frame)
    check_source(source)
    rows = frame.sort_values("uid", kind="stable")
    colours = _colours(rows, stages)
    axes = _new_axes(len(columns), len(stages))
    uids = rows["uid"].to_numpy()
    there = {n: np.where(rows[n].to_numpy() == "empty", "empty", "there") for n in columns}
    said = {n.removeprefix("stage:"): _merged(rows[n].to_numpy(str), colours) for n in stages}
    _cells(axes["columns"], there, colours, uids)
    _cells(axes["stages"], said, colours, uids)
    axes["columns"].set_xlabel("column")
    axes["stages"].set_xlabel("stage")
    many = len(rows) > MOST_NAMED
    label_y(axes["columns"], axis_label("row, by uid", "1") if many else axis_label("row", "uid"))
    axes["stages"].tick_params(labelleft=False)
    _bytes_by_node(axes["bytes"], bytes_by_node(rows), source)
    _versions(axes["versions"], rows["version"].to_numpy(np.int64))
    seen = {str(state) for states in (*there.values(), *said.values()) for state in set(states)}
    _legend(axes["columns"], {state: c for state, c in colours.items() if state in seen})
    return axes


def parts_of(frame: object) -> tuple[list[str], list[str]]:
    """Names of the frame that are columns of values, and names of those that speak of stages."""
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"frame: got {type(frame).__name__}, need a pandas DataFrame. Pass dock.frame()."
        )
    absent = [name for name in IDENTITY if name not in frame.columns]
    if absent:
        raise ValueError(
            f"frame: got {len(frame)} rows without {', '.join(absent)}, need a row a sample. "
            "Pass dock.frame(), or some of its rows."
        )
    names = [str(name) for name in frame.columns if name not in IDENTITY]
    stages = [name for name in names if name.startswith("stage:")]
    return [n for n in names if not n.startswith(("stage:", "bytes:"))], stages


def bytes_by_node(frame: pd.DataFrame) -> pd.Series:
    """Bytes of the frame's rows on each node."""
    sums = frame.filter(regex="^bytes:").sum()
    return sums.rename(lambda name: name.removeprefix("bytes:")).astype(float)


def _colours(frame: pd.DataFrame, stages: Sequence[str]) -> dict[str, str]:
    """Colour by state, holders of most rows first."""
    leased: dict[str, int] = {}
    for name in stages:
        states, counts = np.unique(frame[name].to_numpy(str), return_counts=True)
        for state, count in zip(states.tolist(), counts.tolist(), strict=True):
            if state.startswith("leased by "):
                leased[state] = leased.get(state, 0) + count
    most = sorted(leased, key=lambda state: (-leased[state], state))
    named = dict(zip(sorted(most[: len(HOLDER_COLOURS)]), HOLDER_COLOURS, strict=False))
    if len(most) > len(HOLDER_COLOURS):
        named[OTHERS] = ROLE_COLOURS["reference"]
    first = {name: STATE_COLOURS[name] for name in ("there", "empty", "waiting")}
    return first | named | {name: STATE_COLOURS[name] for name in ("consumed", "unknown")}


def _merged(states: np.ndarray, colours: Mapping[str, str]) -> np.ndarray:
    """The states [R], those of holders without a colour of their own as one."""
    return np.array([s if s in colours else OTHERS for s in states.tolist()], dtype=object)


def _new_axes(num_columns: int, num_stages: int) -> dict[str, Axes]:
    """Two pictures above, as wide as they have columns, and two histograms below."""
    with in_style():
        figure = plt.figure(figsize=(FIGURE_SIZE_IN[0], 5.6), layout="constrained")
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=[2.1, 1])).tolist()
        ratios = [max(2, num_columns), max(2, num_stages)]
        columns, stages = above.subplots(1, 2, sharey=True, width_ratios=ratios)
        nbytes, versions = below.subplots(1, 2)
    return {"columns": columns, "stages": stages, "bytes": nbytes, "versions": versions}


def _cells(
    ax: Axes, states: Mapping[str, np.ndarray], colours: Mapping[str, str], uids: np.ndarray
) -> None:
    """A picture of one state a cell [R, C]."""
    num_rows = len(uids)
    ax.grid(visible=False)
    ax.set_xticks(range(len(states)), list(states), rotation=45, ha="right", rotation_mode="anchor")
    ax.tick_params(axis="both", labelsize="small", length=0)
    ax.spines[:].set_visible(False)
    ax.set_ylim(max(num_rows, 1) - 0.5, -0.5)
    ax.set_xlim(-0.5, max(len(states), 1) - 0.5)
    if not num_rows or not states:
        ax.text(
            0.5,
            0.5,
            "none" if num_rows else "no rows",
            transform=ax.transAxes,
            ha="center",
            color=INK,
        )
        ax.set_yticks([])
        return
    table = {state: to_rgb(colour) for state, colour in colours.items()}
    image = np.array([[table[s] for s in column] for column in states.values()])  # [C, R, 3]
    starts = np.linspace(0, num_rows, min(num_rows, MOST_LINES), endpoint=False).astype(int)
    lines = np.add.reduceat(image, starts, axis=1) / np.diff(starts, append=num_rows)[:, None]
    place = (-0.5, len(states) - 0.5, num_rows - 0.5, -0.5)
    ax.imshow(lines.swapaxes(0, 1), aspect="auto", interpolation="nearest", extent=place)
    ax.vlines(np.arange(1, len(states)) - 0.5, -0.5, num_rows - 0.5, color="white", linewidth=2)
    if num_rows <= MOST_NAMED:
        ax.set_yticks(range(num_rows), [str(uid) for uid in uids])
        ax.hlines(np.arange(1, num_rows) - 0.5, -0.5, len(states) - 0.5, color="white", linewidth=2)
    else:
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))


def _bytes_by_node(ax: Axes, nbytes: pd.Series, source: str) -> None:
    top = float(nbytes.max()) if len(nbytes) else 0.0
    unit, size = next((each for each in UNITS if top >= each[1]), ("B", 1))
    if len(nbytes) > NODES_NAMED:  # a bar each, without names
        ax.set_xlabel(axis_label("node", "nodes by first write"))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        ax.set_xticks(range(len(nbytes)), [short(str(name)) for name in nbytes.index])
        ax.set_xlabel("node")
    ax.bar(range(len(nbytes)), nbytes.to_numpy() / size, color=STATE_COLOURS["there"], width=0.6)
    ax.set_ylim(0, 1.08 * top / size if top else 1)
    ax.set_xlim(-0.7, max(len(nbytes), 1) - 0.3)
    ax.grid(visible=False, axis="x")
    label_y(ax, axis_label("values", unit, source))


def _versions(ax: Axes, versions: np.ndarray) -> None:
    found, counts = np.unique(versions, return_counts=True)
    ax.bar(found, counts, color=ROLE_COLOURS["rollout"], width=0.8)
    if len(found):
        ax.set_xlim(found[0] - 0.9, found[-1] + 0.9)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    else:
        ax.set_xticks([])
    ax.set_ylim(0, 1.08 * counts.max() if len(counts) else 1)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    ax.grid(visible=False, axis="x")
    ax.set_xlabel(axis_label("policy version", "train steps"))
    label_y(ax, axis_label("rows", "1"))


def _legend(ax: Axes, colours: Mapping[str, str]) -> None:
    """What the colours mean, above both pictures."""
    keys = [Patch(facecolor=c, edgecolor="#c9cdd3", label=short(s)) for s, c in colours.items()]
    if keys:
        ax.figure.legend(
            handles=keys, loc="outside upper left", ncols=4, fontsize="small", frameon=False
        )


def short(name: str) -> str:
    """Ray's names of nodes have 56 digits; 8 tell them apart."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{48}\b", r"\1", name)
