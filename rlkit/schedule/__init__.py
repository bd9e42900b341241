"""Schedules: in which order a loop generates, prepares, trains and hands over weights."""

from rlkit.schedule.ahead import asynchronous
from rlkit.schedule.backlog import Backlog
from rlkit.schedule.executors import Inline, Threads
from rlkit.schedule.in_turn import streamed, synchronous
from rlkit.schedule.one_step import one_step_off
from rlkit.schedule.stale import admit, drop, mask, staleness_metrics
from rlkit.schedule.staleness import StalenessRule
from rlkit.schedule.virtual import Virtual

__all__ = [
    "Backlog",
    "Inline",
    "StalenessRule",
    "Threads",
    "Virtual",
    "admit",
    "asynchronous",
    "drop",
    "mask",
    "one_step_off",
    "staleness_metrics",
    "streamed",
    "synchronous",
]
