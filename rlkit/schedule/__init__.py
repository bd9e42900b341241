"""Schedules: in which order a loop generates, prepares, trains and hands over weights."""

from rlkit.schedule.in_turn import streamed, synchronous

__all__ = ["streamed", "synchronous"]
