"""What a Jupyter kernel offers: its shell, ends of cells, widgets, pictures of last resort."""

from __future__ import annotations

import base64
import io
import logging
import sys
from collections.abc import Callable
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from rlkit.viz.curves import plot_reward
from rlkit.viz.frames import has_values
from rlkit.viz.style import FIGURE_SIZE_IN

logger = logging.getLogger("rlkit.viz")


def shell() -> Any:
    """IPython's shell, or None."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    return ipython.get_ipython() if ipython is not None else None


def after_cells(callback: Callable[[object], None], *, call: bool) -> None:
    """Have IPython call back at the end of each cell, or no more."""
    events = getattr(shell(), "events", None)
    if events is not None and call:
        events.register("post_run_cell", callback)
    elif events is not None and callback in events.callbacks["post_run_cell"]:
        events.unregister("post_run_cell", callback)


def picture(frame: pd.DataFrame) -> dict[str, object]:
    """The reward curve as PNG, for what shows no HTML, or not its SVG."""
    if not has_values(frame, "reward"):
        return {}
    figure, png = Figure(figsize=FIGURE_SIZE_IN, layout="constrained"), io.BytesIO()
    plot_reward(frame, ax=figure.subplots())
    figure.savefig(png, format="png")
    return {"image/png": base64.b64encode(png.getvalue()).decode()}


def html_widget() -> Any:
    """An empty HTML widget in a Jupyter kernel that has ipywidgets; elsewhere None."""
    if getattr(shell(), "kernel", None) is None:
        return None
    try:
        import ipywidgets
    except ImportError:
        logger.info("ipywidgets is not installed: the dashboard writes lines instead")
        return None
    return ipywidgets.HTML()
