"""Figures and widgets from DataFrames; imports neither ray nor torch."""

from rlkit.viz.curves import plot_metric, plot_reward, plot_throughput
from rlkit.viz.dashboard import Dashboard
from rlkit.viz.dock import plot_dock
from rlkit.viz.dock_view import DockView
from rlkit.viz.losses import loss_summary, plot_losses
from rlkit.viz.memory import plot_memory
from rlkit.viz.mismatch import plot_mismatch
from rlkit.viz.phases import plot_phases
from rlkit.viz.style import PHASE_COLOURS, ROLE_COLOURS, use_style
from rlkit.viz.timeline import plot_timeline
from rlkit.viz.tokens import TokenView, show_tokens
from rlkit.viz.what_if import WhatIf

__all__ = [
    "PHASE_COLOURS",
    "ROLE_COLOURS",
    "Dashboard",
    "DockView",
    "TokenView",
    "WhatIf",
    "loss_summary",
    "plot_dock",
    "plot_losses",
    "plot_memory",
    "plot_metric",
    "plot_mismatch",
    "plot_phases",
    "plot_reward",
    "plot_throughput",
    "plot_timeline",
    "show_tokens",
    "use_style",
]
