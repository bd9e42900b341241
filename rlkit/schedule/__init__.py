"""Schedules: in which order a loop generates, prepares, trains and hands over weights."""

from rlkit.schedule.ahead import asynchronous, one_step_off
from rlkit.schedule.executors import Inline, Threads
from rlkit.schedule.in_turn import streamed, synchronous
from rlkit.schedule.stale import admit, drop, mask, staleness_metrics
from rlkit.schedule.staleness import StalenessRule

__all__ = [
    "Inline",
    "StalenessRule",
    "Threads",
    "admit",
    "asynchronous",
    "drop",
    "mask",
    "one_step_off",
    "staleness_metrics",
    "streamed",
    "synchronous",
]
