"""Which worker did what when: one lane a worker, waits hatched, idle time written beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from rlkit.trace import check_spans, idle_fractions, is_inside, merged
from rlkit.viz.frames import Frames, as_runs
from rlkit.viz.phases import phase_colour
from rlkit.viz.style import (
    FIGURE_SIZE_IN,
    INK,
    PHASE_COLOURS,
    axis_label,
    check_source,
    legend_above,
    new_axes,
    write_beside,
)

STORE_COLOUR = "#2f7f79"
LANE = 0.78  # height of a lane's bars; lanes are 1 apart
NESTED = 0.4  # height of a span inside another one
RUN_GAP = 1.0  # lanes between two runs: room for the name
LANE_IN, MARGIN_IN, MOST_IN = 0.3, 1.0, 14.0
NARROW = 1 / 4000  # of the window: gaps and spans below it are drawn as wide as it


@dataclass(frozen=True, slots=True)
class _Lane:
    """Spans of one worker of one run, its height on the y axis, its idle share."""

    worker: str
    y: float
    times: np.ndarray
    """[spans, 2] start and end, s."""
    keys: np.ndarray
    """[spans] what each is drawn as."""
    inside: np.ndarray
    """[spans] whether it lies in another one."""
    idle: float


def plot_timeline(
    frame: Frames,
    *,
    ax: Axes | None = None,
    source: str = "measured",
) -> Axes:
    """A lane a worker, the driver first; colour by stage, hatched where it waits.

    frame: `trace.frame()`, or a part of its rows; a dict {name: frame} stacks runs over one time
    axis, each run from its own first start. Beside a lane stands its share of idle time
    (`trace.idle_fractions`). Spans inside others are lower, so that both are seen. source:
    "measured", "simulated" or "paper". Returns the axes.
    """
    label = axis_label("time since the first span", "s", check_source(source))
    runs = as_runs(frame, check_spans)
    lanes, titles, lowest = _lay_out(runs)
    window_s = max(lane.times.max() for lane in lanes)
    ax = new_axes(ax) if ax is not None else _tall_axes(lowest + 1)
    stages = _stages(lanes)
    for key in stages:
        _draw_stage(ax, lanes, key, stages, narrow_s=window_s * NARROW)
    for lane in lanes:
        write_beside(ax, lane.y, "–" if np.isnan(lane.idle) else f"idle {lane.idle:.0%}")
    for y, title in titles:
        place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": "small"}
        ax.annotate(title, (0.0, y), weight="bold", color=INK, **place)
    ax.set_xlim(0, window_s if window_s > 0 else 1)
    ax.set_ylim(lowest + 0.6, min(-0.6, (titles[0][0] if titles else 0) - 0.5))
    ax.set_yticks([lane.y for lane in lanes], [lane.worker for lane in lanes])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(label)
    legend_above(ax)
    return ax


def _tall_axes(num_lanes: float) -> Axes:
    ax = new_axes()
    figure = ax.get_figure(root=True)
    if figure is not None:
        height_in = min(MOST_IN, max(2.0, MARGIN_IN + LANE_IN * num_lanes))
        figure.set_size_inches(FIGURE_SIZE_IN[0], height_in)
    return ax


def _lay_out(
    runs: dict[str, pd.DataFrame],
) -> tuple[list[_Lane], list[tuple[float, str]], float]:
    """Lanes from top to bottom, names of runs with their place, and the lowest lane's y."""
    lanes, titles, y = [], [], 0.0
    for name, frame in runs.items():
        if name:
            titles.append((y, name))
            y += RUN_GAP
        known = idle_fractions(frame)
        idle = dict(zip(known["worker"], known["idle_fraction"], strict=True))
        times = frame[["start_s", "end_s"]].to_numpy(float)
        times = times - times.min()
        names = frame["worker"].to_numpy(str)
        keys = np.array([_key(str(stage)) for stage in frame["stage"]], dtype=object)
        for worker in _in_order(names, times[:, 0]):
            mine = names == worker
            inside = np.array(is_inside(times[mine].tolist()), dtype=bool)
            lanes.append(_Lane(worker, y, times[mine], keys[mine], inside, idle[worker]))
            y += 1.0
    return lanes, titles, y - 1.0


def _in_order(workers: np.ndarray, starts_s: np.ndarray) -> list[str]:
    """The driver, then groups by their first start, ranks by number."""
    groups: dict[str, float] = {}
    for worker in np.unique(workers).tolist():
        group = worker.rpartition("/")[0] or worker
        first_s = starts_s[workers == worker].min()
        groups[group] = min(first_s, groups.get(group, first_s))

    def key(worker: str) -> tuple[bool, float, str, int, str]:
        group, _, rank = worker.rpartition("/")
        group = group or worker
        number = int(rank) if rank.isdigit() else 0
        return worker != "driver", groups[group], group, number, worker

    return sorted(np.unique(workers).tolist(), key=key)


def _key(stage: str) -> str:
    """What a stage is drawn as: reshard/transfer is reshard, every wait a wait."""
    return stage.split("/")[0] if stage.split("/")[0] else stage


def _stages(lanes: list[_Lane]) -> list[str]:
    """Keys to draw, in the order of the legend: known phases, others, the store, waits."""
    there = dict.fromkeys(key for lane in lanes for key in lane.keys)
    known = [name for name in PHASE_COLOURS if name in there]
    last = [name for name in ("store", "wait") if name in there]
    return known + [name for name in there if name not in PHASE_COLOURS and name not in last] + last


def _draw_stage(
    ax: Axes, lanes: list[_Lane], key: str, stages: list[str], *, narrow_s: float
) -> None:
    """All spans of one key, bars of a height and lane as one artist; only the first has a label."""
    others = [name for name in stages if name not in (*PHASE_COLOURS, "store", "wait")]
    if key == "wait":
        look = {"facecolor": "white", "edgecolor": "#9a9da5", "hatch": "//////", "linewidth": 0.0}
    else:
        colour = STORE_COLOUR if key == "store" else phase_colour(key, others)
        look = {"facecolor": colour, "linewidth": 0.0}
    label = {"wait": "waiting", "store": "store"}.get(key, key)
    order = {"wait": 2.4, "store": 2.6}.get(key, 2.0)
    for lane in lanes:
        mine = lane.keys == key
        for chosen, height in ((mine & ~lane.inside, LANE), (mine & lane.inside, NESTED)):
            bars = merged(lane.times[chosen], gap_s=narrow_s)
            if not len(bars):
                continue
            widths = np.maximum(bars[:, 1] - bars[:, 0], narrow_s)
            nested = height == NESTED
            ax.broken_barh(
                list(zip(bars[:, 0], widths, strict=True)),
                (lane.y - height / 2, height),
                zorder=order + 0.1 * nested,
                label=label,
                **look,
            )
            label = "_nolegend_"
