"""What memory holds in each phase: stacked bars by category, the unexplained rest and the limit."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from rlkit.trace import CATEGORIES
from rlkit.viz.frames import has_values
from rlkit.viz.style import (
    PHASE_COLOURS,
    axis_label,
    check_source,
    label_y,
    legend_above,
    limit_line,
    new_axes,
    stacked_bars,
)

GIB = 2.0**30
HOST = "host_swap"
RESIDUAL = "residual"
# Any two may be neighbours, so any two differ for colour-blind readers (CIELAB distance over 15).
CATEGORY_COLOURS = {
    "weights": "#3f90da",
    "gradients": "#ffa90e",
    "optimizer": "#e76300",
    "activations": "#bd1f01",
    "kv_cache": "#2f7f79",
    "gather_buffers": "#832db6",
    "communicators": "#5a4a42",
    RESIDUAL: "#c9cdd3",
    HOST: "white",
}
STACK = tuple(CATEGORY_COLOURS)
"""Categories from the bottom of a bar to its top."""
TIDY = ("phase", "category", "bytes")
SMALL_FROM, MOST_UPRIGHT = 6, 9  # bars whose names fit side by side


def memory_by_phase(frame: pd.DataFrame) -> pd.DataFrame:
    """GiB by category: one row a phase, one column a category.

    frame: `trace.frame()`, of which each phase (`reshard/transfer` belongs to reshard) and group of
    workers gives its fullest sample as a whole: one worker's categories at one moment, not the
    maximum of each. Or a tidy frame with the columns phase, category and bytes (a plan's memory,
    say), which is taken as it is.
    """
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(
            f"frame: got {type(frame).__name__}, need a pandas DataFrame. Pass trace.frame(), or a "
            f"frame with the columns {', '.join(TIDY)}."
        )
    table = _from_tidy(frame) if set(TIDY) <= set(frame.columns) else _from_spans(frame)
    return pd.DataFrame(table[[name for name in STACK if name in table]])


def _from_tidy(frame: pd.DataFrame) -> pd.DataFrame:
    unknown = sorted(set(map(str, frame["category"])) - set(STACK))
    if unknown:
        raise ValueError(
            f"category: got {unknown}, need some of {', '.join((*CATEGORIES, RESIDUAL))}. "
            f"Call what fits none of them {RESIDUAL!r}."
        )
    twice = int(frame.duplicated(["phase", "category"]).to_numpy().sum())
    absent = int(frame["bytes"].isna().to_numpy().sum())
    if twice or absent or frame.empty:
        raise ValueError(
            f"frame: got {len(frame)} rows, {twice} of a phase and category that another row has, "
            f"{absent} without bytes; need one number of bytes for each. "
            "Take one worker's rows, or their maximum."
        )
    table = frame.pivot(index="phase", columns="category", values="bytes").fillna(0.0)
    return table.loc[list(dict.fromkeys(frame["phase"]))].astype(float) / GIB


def _from_spans(frame: pd.DataFrame) -> pd.DataFrame:
    total = f"peak/{RESIDUAL}_bytes", "peak/allocated_bytes", "stage", "worker"
    if not set(total) <= set(frame.columns) or not has_values(frame, "peak/allocated_bytes"):
        raise ValueError(
            f"frame: got {len(frame)} rows without memory (a column peak/allocated_bytes that "
            "holds numbers), need spans of workers' stages. Pass trace.frame() after a step, or "
            f"a frame with the columns {', '.join(TIDY)}."
        )
    known = frame.dropna(subset="peak/allocated_bytes").reset_index(drop=True)
    phase = known["stage"].str.partition("/")[0]
    group = known["worker"].str.replace(r"/[^/]*$", "", regex=True)
    fullest = known.groupby([phase, group], sort=False)["peak/allocated_bytes"].idxmax()
    places = {name: place for place, name in enumerate(PHASE_COLOURS)}
    order = sorted(fullest.index, key=lambda key: places.get(key[0], len(places)))
    columns = {f"peak/{name}_bytes": name for name in STACK if f"peak/{name}_bytes" in frame}
    rows = known.loc[[fullest[key] for key in order], list(columns)].rename(columns=columns)
    rows.index = pd.Index(["\n".join(key) for key in order])
    return rows.astype("Float64").fillna(0.0).astype(float) / GIB


def plot_memory(
    frame: pd.DataFrame,
    *,
    limit_gib: float | None = None,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """Memory of one worker by phase and category as stacked bars, the unexplained rest on top.

    frame: `trace.frame()` (each phase's fullest sample) or columns phase, category, bytes; see
    `memory_by_phase`. limit_gib: what the device has, drawn dashed. Swapped out host memory stands
    above the device's, hatched: it does not count towards the limit. A rest below 0 (a worker that
    explains more than is allocated) hangs below the axis. source: "measured", "simulated" or
    "paper". Returns the axes.
    """
    label = axis_label("memory of a worker", "GiB", check_source(source))
    if limit_gib is not None and not limit_gib > 0:
        raise ValueError(
            f"limit_gib: got {limit_gib!r}, need more than 0 GiB. Leave it out for no limit."
        )
    table = memory_by_phase(frame)
    ax = new_axes(ax)
    shown = table.loc[:, (table != 0).any()]
    colours = [CATEGORY_COLOURS[name] for name in shown.columns]
    stacked_bars(ax, shown.rename(columns=_shown), colours, width=0.8 if len(table) > 2 else 0.4)
    for bar in ax.containers[-1] if HOST in shown else ():  # the last category
        if bar.get_height():
            bar.set(hatch="////", edgecolor="#717581")
    if len(table) > MOST_UPRIGHT:
        ax.tick_params(axis="x", labelrotation=90, labelsize="small")
    elif len(table) > SMALL_FROM:
        ax.tick_params(axis="x", labelsize="small")
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("phase")
    label_y(ax, label)
    values = table.to_numpy(float)
    top = max(values.clip(min=0).sum(axis=1).max(), limit_gib or 0.0)
    low = min(0.0, values.min())
    ax.set_ylim(1.05 * low, 1.08 * top if top > 0 else 1)
    if low < 0:
        ax.axhline(0, color="black", linewidth=0.8)
    if limit_gib is not None:
        limit_line(ax, limit_gib, f"device limit {limit_gib:g} GiB", inside=True)
    legend_above(ax)
    return ax


def _shown(name: str) -> str:
    if name == RESIDUAL:
        return "residual (unexplained)"
    return "host swap (host memory)" if name == HOST else name.replace("_", " ")
