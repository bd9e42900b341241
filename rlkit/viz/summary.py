"""The few numbers a dashboard shows of a run, and the one line they make in a terminal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from rlkit.viz.frames import has_values

RECENT_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Numbers of the last step; None where the run does not log them (NaN where it logs NaN)."""

    step: int | None = None
    """Number of the last step."""
    num_done: int | None = None
    """Steps done, of `num_total`."""
    num_total: int | None = None
    """Steps asked for, if known."""
    reward: float | None = None
    """Mean reward of the last step."""
    reward_recent: float | None = None
    """Mean of it over the last five steps."""
    tokens_per_s: float | None = None
    """Throughput of the last step."""
    step_s: float | None = None
    """Mean seconds a step over the last five: `time/step_s`, else the time between two rows."""
    accuracy: float | None = None
    """The last evaluation."""

    @property
    def left_s(self) -> float | None:
        """Seconds left at the recent pace; None if the end or the pace is unknown."""
        if self.num_total is None or self.num_done is None or self.step_s is None:
            return None
        return (self.num_total - self.num_done) * self.step_s


def summarise(
    frame: pd.DataFrame, *, total_steps: int | None = None, row_s: float | None = None
) -> Summary:
    """Numbers of the last rows of `log.frame()`; row_s stands in for a missing step time."""
    if frame.empty:
        return Summary(num_total=total_steps)
    recent = frame.tail(RECENT_STEPS)
    step = int(frame["step"].iloc[-1])
    step_s = _mean(recent, "time/step_s")
    return Summary(
        step=step,
        num_done=None if total_steps is None else min(step + 1, total_steps),
        num_total=total_steps,
        reward=_last(recent, "reward"),
        reward_recent=_mean(recent, "reward"),
        tokens_per_s=_last(recent, "throughput/tokens_per_s"),
        step_s=row_s if step_s is None or step_s != step_s else step_s,
        accuracy=_last(frame.dropna(subset=["eval/accuracy"]), "eval/accuracy")
        if has_values(frame, "eval/accuracy")
        else None,
    )


def _last(frame: pd.DataFrame, name: str) -> float | None:
    return frame[name].to_numpy(float)[-1].item() if name in frame.columns else None


def _mean(frame: pd.DataFrame, name: str) -> float | None:
    if not has_values(frame, name):
        return float("nan") if name in frame.columns else None
    with np.errstate(invalid="ignore"):  # infinities of both signs
        return float(np.nanmean(frame[name].to_numpy(float)))


def terminal_line(summary: Summary) -> str:
    """`step 41 (42/100) | reward 0.812 (last 5: 0.790) | 1,234 tokens/s | 0.520 s/step`, ASCII."""
    if summary.step is None:
        return "waiting for the first step"
    done = "" if summary.num_total is None else f" ({summary.num_done}/{summary.num_total})"
    parts = [f"step {summary.step}{done}"]
    if summary.reward is not None:
        parts.append(f"reward {summary.reward:.3f} (last 5: {summary.reward_recent:.3f})")
    if summary.accuracy is not None:
        parts.append(f"accuracy {summary.accuracy:.3f}")
    if summary.tokens_per_s is not None:
        parts.append(f"{summary.tokens_per_s:,.0f} tokens/s")
    if summary.step_s is not None:
        parts.append(f"{summary.step_s:.3g} s/step")
    if summary.left_s:
        parts.append(f"{duration(summary.left_s)} left")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
