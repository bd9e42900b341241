"""Figures and widgets from DataFrames; imports neither ray nor torch."""

from rlkit.viz.curves import plot_metric, plot_reward, plot_throughput
from rlkit.viz.dashboard import Dashboard
from rlkit.viz.phases import plot_phases
from rlkit.viz.style import PHASE_COLOURS, ROLE_COLOURS, use_style

__all__ = [
    "PHASE_COLOURS",
    "ROLE_COLOURS",
    "Dashboard",
    "plot_metric",
    "plot_phases",
    "plot_reward",
    "plot_throughput",
    "use_style",
]
