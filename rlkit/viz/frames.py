"""Checks of the DataFrames that come in, and their shape for drawing: one column a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from rlkit.checks import did_you_mean, whole

Frames = pd.DataFrame | Mapping[str, pd.DataFrame]


def check_frame(frame: object) -> pd.DataFrame:
    """The frame with rows numbered afresh, if it is a DataFrame with rows and a `step` column."""
    if not isinstance(frame, pd.DataFrame):
        hint = "Pass log.frame()." if hasattr(frame, "frame") else "Pass what log.frame() returns."
        raise TypeError(
            f"frame: got {type(frame).__name__}, need a pandas DataFrame with one row a step "
            f"(or a dict of them by name). {hint}"
        )
    if frame.empty:
        raise ValueError(
            "frame: got no rows, need at least one step. Call log.add(step, ...) before drawing."
        )
    need_column(frame, "step")
    return frame.reset_index(drop=True)  # concatenated seeds repeat their row labels


def as_runs(
    frames: Frames, check: Callable[[object], pd.DataFrame] = check_frame
) -> dict[str, pd.DataFrame]:
    """Runs by name, each checked; a lone frame has the name ""."""
    if not isinstance(frames, Mapping):
        return {"": check(frames)}
    if not frames:
        raise ValueError(
            "frame: got a dict without runs, need {name: frame, ...}. Pass log.frame() or "
            "trace.frame() of each run."
        )
    return {str(name): check(frame) for name, frame in frames.items()}


def need_column(frame: pd.DataFrame, name: str, advice: str = "") -> None:
    """Raise ValueError unless the frame has the column."""
    if name not in frame.columns:
        raise ValueError(
            f"frame: got columns {_listed(frame.columns)}, need {name!r}. "
            + (advice or f"Log it with log.add(step, {{{name!r}: ...}}).")
            + did_you_mean(name, map(str, frame.columns))
        )


def _listed(columns: pd.Index, limit: int = 12) -> str:
    names = [str(column) for column in columns]
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def has_values(frame: pd.DataFrame, name: str) -> bool:
    """Whether the column is there and holds something."""
    return name in frame.columns and not pd.Series(frame[name]).isna().all()


def numbers(frame: pd.DataFrame, name: str) -> pd.Series:
    """Column `name` as floats, infinities as NaN; ValueError if it holds text or nothing."""
    need_column(frame, name)
    try:
        values = pd.Series(pd.to_numeric(pd.Series(frame[name]))).to_numpy(float)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{name}: got {frame[name].dtype} values that are no numbers ({error}), "
            "need a column of numbers. Draw another column, or convert it first."
        ) from error
    finite = np.isfinite(values)
    if not finite.any():
        raise ValueError(
            f"{name}: got {len(values)} rows without one finite number, need at least one. "
            "Look at frame[name] for where it turned to NaN."
        )
    return pd.Series(np.where(finite, values, np.nan), index=frame.index)


def by_seed(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Values of one metric, index step (ascending), one column a seed (0 without a seed column)."""
    table = pd.DataFrame({"step": numbers(frame, "step"), "value": numbers(frame, name)})
    table["seed"] = frame["seed"].to_numpy() if "seed" in frame.columns else 0
    table = table.dropna(subset=["step"])
    twice = int(table.duplicated(["step", "seed"]).sum())
    if twice:
        raise ValueError(
            f"frame: got {twice} steps more than once, need one row a step and seed. "
            "Add a `seed` column to tell runs apart, or pass a dict of frames by name."
        )
    return table.pivot(index="step", columns="seed", values="value")


def smoothed(table: pd.DataFrame, window: int) -> pd.DataFrame:
    """Mean of the last `window` steps, per seed; what was missing stays missing."""
    window = whole("smooth", window, what="step")
    means = pd.DataFrame(table.rolling(window, min_periods=1).mean())
    return means.mask(table.isna())


def over_seeds(table: pd.DataFrame) -> pd.Series:
    """Mean over the seeds that have a value, by step."""
    return pd.Series(table.mean(axis=1))


def has_lone_points(values: pd.Series) -> bool:
    """Whether some value stands between two gaps, where a line without markers is invisible."""
    there = values.notna()
    before = there.shift(1, fill_value=False)
    after = there.shift(-1, fill_value=False)
    return bool((there & ~before & ~after).any())
