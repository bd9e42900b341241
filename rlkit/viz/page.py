"""The dashboard's HTML: numbers, a reward curve and a phase bar as small hand-made SVG.

A string takes 4 to 7 ms to build (measured, 1 to 10,000 rows) and a matplotlib PNG 20 ms or more; a
string also follows the page's width and its light or dark theme. Its size does not grow with the
run: a curve has at most 240 points. Text from outside is escaped.
"""

from __future__ import annotations

from html import escape

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from rlkit.glossary import unit_of
from rlkit.viz.phases import phase_colour, phase_seconds
from rlkit.viz.style import PHASE_COLOURS, ROLE_COLOURS
from rlkit.viz.summary import RECENT_STEPS, Summary, duration

MAX_POINTS = 240
WIDTH, HEIGHT = 680, 170
LEFT, RIGHT, TOP, BOTTOM = 56, 672, 10, 138  # the plot area in the chart, in px
MAX_PHASES = 12


def page_html(frame: pd.DataFrame, summary: Summary) -> str:
    """The whole dashboard of `log.frame()`."""
    parts = [_numbers(summary), _progress(summary)]
    if summary.reward is not None:
        parts.append(_reward_chart(frame))
    elif summary.step is not None:
        parts.append("<div>no reward logged: log.add(step, metrics, reward=...)</div>")
    recent = frame.tail(RECENT_STEPS).dropna(axis=1, how="all")
    if any(str(name).startswith("time/") and str(name).endswith("_s") for name in recent.columns):
        parts.append(_phase_bar(recent))
    return (
        '<div class="rlkit-dashboard" style="font-size:13px;'
        "font-family:var(--jp-ui-font-family,sans-serif);"
        f'color:var(--jp-ui-font-color1,inherit);max-width:{WIDTH}px;line-height:1.4">'
        + "".join(parts)
        + "</div>"
    )


def _numbers(summary: Summary) -> str:
    if summary.step is None:
        return "<div>waiting for the first step</div>"
    done = "" if summary.num_total is None else f" ({summary.num_done} of {summary.num_total})"
    tiles = [
        ("step", f"{summary.step}{done}"),
        ("reward", _number(summary.reward)),
        (f"reward, mean of last {RECENT_STEPS}", _number(summary.reward_recent)),
        ("tokens/s", "–" if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f}"),
        ("s/step", _number(summary.step_s)),
    ]
    if summary.accuracy is not None:
        tiles.insert(3, ("accuracy, last evaluation", _number(summary.accuracy)))
    if summary.left_s:
        tiles.append(("left at this pace", duration(summary.left_s)))
    cells = "".join(
        f'<div><div style="opacity:.7;font-size:11px">{escape(name)}</div>'
        f'<div style="font-size:17px;font-variant-numeric:tabular-nums">{escape(value)}</div></div>'
        for name, value in tiles
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 24px">{cells}</div>'


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _progress(summary: Summary) -> str:
    if summary.num_total is None:
        return ""
    share = (summary.num_done or 0) / summary.num_total
    return (
        f'<div role="progressbar" aria-valuenow="{100 * share:.0f}" aria-valuemin="0" '
        'aria-valuemax="100" style="margin:6px 0;height:6px;border-radius:3px;'
        'background:rgba(128,128,128,.25)">'
        f'<div style="width:{100 * share:.1f}%;height:100%;border-radius:3px;'
        f'background:{ROLE_COLOURS["rollout"]}"></div></div>'
    )


def thin(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points: means of equal runs of points; a run without numbers stays NaN."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), limit + 1).astype(int)[:-1]
    counts = np.add.reduceat(np.isfinite(y).astype(float), edges)
    sums = np.add.reduceat(np.where(np.isfinite(y), y, 0.0), edges)
    means = np.divide(sums, counts, out=np.full(limit, np.nan), where=counts > 0)
    last = np.append(edges[1:], len(x)) - 1
    return x[last], means


def _reward_chart(frame: pd.DataFrame) -> str:
    """Reward of each step (faint), its mean over the last five, and evaluations as dots."""
    step = frame["step"].to_numpy(float)
    if np.any(np.diff(step) <= 0):  # a loop run twice into the same log: count rows instead
        step = np.arange(len(frame), dtype=float)
    reward = frame["reward"].to_numpy(float)
    rolling = frame["reward"].rolling(RECENT_STEPS, min_periods=1)
    recent = pd.Series(rolling.mean()).to_numpy(float)
    accuracy = np.full(len(frame), np.nan)
    if "eval/accuracy" in frame.columns:
        accuracy = frame["eval/accuracy"].to_numpy(float)
    shown = reward[np.isfinite(reward)]
    if not len(shown):
        return "<div>reward: every value so far is NaN or infinite</div>"
    with_dots = np.abs(shown).max() <= 1.5 and np.isfinite(accuracy).any()
    values = np.append(shown, accuracy[np.isfinite(accuracy)]) if with_dots else shown
    y_range = _padded(float(values.min()), float(values.max()))
    x_range = (step[0], step[-1])
    colour = ROLE_COLOURS["reward"]
    lines = _path(*thin(step, reward), x_range, y_range, f'stroke="{colour}" stroke-opacity=".45"')
    lines += _path(*thin(step, recent), x_range, y_range, f'stroke="{colour}" stroke-width="2"')
    dots = _dots(step, accuracy, x_range, y_range) if with_dots else ""
    key = " (thick: mean of last 5" + ("; dots: accuracy)" if with_dots else ")")
    label = f"reward [{unit_of('reward')}]{key}, against step [train steps], measured"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" role="img" aria-label="{label}" '
        f'style="max-width:{WIDTH}px" fill="none" stroke="none" font-size="11">'
        f"{_axes(x_range, y_range)}{lines}{dots}"
        f'<text x="{LEFT}" y="{HEIGHT - 4}" fill="currentColor">{label}</text></svg>'
    )


def _padded(low: float, high: float) -> tuple[float, float]:
    """The range with 5 % of it on both sides, or something to either side of a lone value."""
    margin = 0.05 * (high - low) or 0.1 * abs(low) or 1.0
    return low - margin, high + margin


def _axes(x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    """Grid lines with their values, and the first and last step."""
    ticks = np.asarray(MaxNLocator(4).tick_values(*y_range))
    ticks = ticks[(y_range[0] <= ticks) & (ticks <= y_range[1])]
    parts = [
        f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="currentColor" stroke-opacity=".15"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">'
        f"{tick:.4g}</text>"
        for tick, y in zip(ticks, _scale(ticks, y_range, BOTTOM, TOP), strict=True)
    ]
    ends = {x_range[1]: (RIGHT, "end"), x_range[0]: (LEFT, "start")}  # one if they are equal
    for value, (x, anchor) in ends.items():
        parts.append(
            f'<text x="{x}" y="{BOTTOM + 14}" text-anchor="{anchor}" fill="currentColor">'
            f"{value:g}</text>"
        )
    return "".join(parts)


def _scale(values: np.ndarray, ends: tuple[float, float], low: float, high: float) -> np.ndarray:
    """Values in pixels: the ends of their range at `low` and `high`."""
    return low + (values - ends[0]) / (ends[1] - ends[0] or 1.0) * (high - low)


def _path(
    x: np.ndarray,
    y: np.ndarray,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    stroke: str,
) -> str:
    """A line through the finite points; a gap where a value is missing."""
    px, py = _scale(x, x_range, LEFT, RIGHT), _scale(y, y_range, BOTTOM, TOP)
    commands, pen_down = [], False
    for a, b in zip(px, py, strict=True):
        if np.isfinite(b):
            commands.append(f"{'L' if pen_down else 'M'}{a:.1f} {b:.1f}")
        pen_down = bool(np.isfinite(b))
    if len(commands) == 1:
        commands.append("h8")  # a lone point is a short dash
    return f'<path d="{"".join(commands)}" {stroke}/>'


def _dots(
    x: np.ndarray, y: np.ndarray, x_range: tuple[float, float], y_range: tuple[float, float]
) -> str:
    there = np.isfinite(y)
    x, y = thin(x[there], y[there], MAX_POINTS // 4)
    px, py = _scale(x, x_range, LEFT, RIGHT), _scale(y, y_range, BOTTOM, TOP)
    return "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="currentColor"/>'
        for a, b in zip(px, py, strict=True)
    )


def _phase_bar(recent: pd.DataFrame) -> str:
    """One bar, the mean of the last steps cut by phase, with seconds and shares in words below."""
    seconds = phase_seconds(recent).mean()
    total = float(seconds.sum())
    if not total > 0:
        return ""
    extra = [str(name) for name in seconds.index if name not in PHASE_COLOURS]
    x, rects, words = 0.0, [], []
    for name, value in seconds.iloc[:MAX_PHASES].items():
        width, colour = WIDTH * value / total, phase_colour(str(name), extra)
        text = escape(f"{name} {value:.3g} s ({100 * value / total:.0f} %)")
        rects.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="16" fill="{colour}" '
            f'stroke="var(--jp-layout-color0,white)"><title>{text}</title></rect>'
        )
        words.append(
            '<span style="white-space:nowrap"><span style="display:inline-block;width:10px;'
            f'height:10px;background:{colour}"></span> {text}</span>'
        )
        x += width
    label = f"seconds a step by phase, mean of last {len(recent)}, measured"
    return (
        f'<div style="opacity:.7;font-size:11px">{label}</div>'
        f'<svg viewBox="0 0 {WIDTH} 16" width="100%" role="img" aria-label="{label}" '
        f'style="max-width:{WIDTH}px;display:block">{"".join(rects)}</svg>'
        f'<div style="display:flex;flex-wrap:wrap;gap:0 16px;font-size:12px">{"".join(words)}</div>'
    )
