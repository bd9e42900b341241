import pandas as pd
import pytest

from rlkit import viz
from rlkit.viz.mismatch import BINS


def log_frame(*shares):
    rows = [{"step": i, **dict(zip(BINS, row, strict=True))} for i, row in enumerate(shares)]
    return pd.DataFrame(rows)


NEAR = log_frame([0, 0, 0, 1, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 0, 0])


def test_bars_are_means_over_steps():
    ax = viz.plot_mismatch(NEAR)
    heights = [bar.get_height() for bar in ax.patches]
    assert len(heights) == 7
    assert heights[2:4] == [0.25, 0.75]


def test_bins_are_named_by_their_borders():
    labels = [label.get_text() for label in viz.plot_mismatch(NEAR).get_xticklabels()]
    assert labels[0] == "below\n0.5"
    assert labels[2:4] == ["0.9 to\n0.99", "0.99 to\n1.01"]
    assert labels[-1] == "above\n2"


def test_an_empty_bin_lies_under_the_axis():
    ax = viz.plot_mismatch(NEAR)
    assert ax.patches[0].get_height() < ax.get_ylim()[0]


def test_two_runs_stand_side_by_side():
    ax = viz.plot_mismatch({"fp32": NEAR, "bf16": NEAR})
    bars = ax.patches
    assert len(bars) == 14
    assert bars[3].get_x() < bars[10].get_x() < bars[4].get_x()
    assert ax.get_legend_handles_labels()[1] == ["fp32", "bf16"]


def test_a_run_without_the_metrics_says_how_to_log_them():
    with pytest.raises(ValueError, match="mismatch_metrics"):
        viz.plot_mismatch(NEAR[["step"]])
