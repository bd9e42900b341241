import subprocess
import sys
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest

from rlkit import viz
from rlkit.glossary import unit_of
from rlkit.viz.style import PHASE_COLOURS, RUN_COLOURS, new_axes

# Machado, Oliveira and Fernandes (2009), severity 1: linear RGB as a dichromat sees it.
DICHROMATS = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}


def cielab(colour, sight):
    """CIELAB of a colour "#rrggbb" as seen through a matrix on linear RGB."""
    encoded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(np.array(sight) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", DICHROMATS)
def test_stacked_neighbours_differ_for_colour_blind_readers(sight):
    seen = [cielab(colour, DICHROMATS[sight]) for colour in PHASE_COLOURS.values()]
    assert min(np.linalg.norm(a - b) for a, b in pairwise(seen)) > 15


@pytest.mark.parametrize("sight", DICHROMATS)
def test_first_four_runs_differ_for_colour_blind_readers(sight):
    seen = [cielab(colour, DICHROMATS[sight]) for colour in RUN_COLOURS[:4]]
    pairs = [(a, b) for i, a in enumerate(seen) for b in seen[:i]]
    assert min(np.linalg.norm(a - b) for a, b in pairs) > 15


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("time/generate_s", "s"),
        ("throughput/tokens_per_s_per_device", "tokens/s/device"),
        ("policy/kl_ref", "nats"),
        ("policy/clip_fraction", "1"),
        ("mine/peak_gib_max", "GiB"),
        ("mine/length_tokens", "tokens"),
        ("mine/gib_per_s", "GiB/s"),
        ("mine/rows_per_group", "rows/group"),
        ("mine/s", "1"),
        ("mine/score", "1"),
    ],
)
def test_unit_is_the_glossarys_or_the_endings(name, unit):
    assert unit_of(name) == unit


def test_figure_has_the_house_format():
    ax = new_axes()
    assert tuple(ax.figure.get_size_inches()) == (7.0, 3.2)
    assert ax.figure.get_constrained_layout()
    assert not ax.spines["top"].get_visible()
    assert not ax.spines["right"].get_visible()
    assert ax.xaxis.get_gridlines()[0].get_visible()


def test_drawing_leaves_the_users_settings_alone(frame):
    before = dict(plt.rcParams)
    viz.plot_reward(frame)
    assert dict(plt.rcParams) == before


def test_use_style_sets_the_settings():
    with plt.rc_context():
        viz.use_style()
        assert list(plt.rcParams["figure.figsize"]) == [7.0, 3.2]
        assert plt.rcParams["axes.prop_cycle"].by_key()["color"][0] == "#3f90da"


def test_axes_of_another_kind_are_a_type_error(frame):
    with pytest.raises(TypeError, match="ax: got Figure, need a matplotlib Axes"):
        viz.plot_reward(frame, ax=plt.figure())


def test_legend_stays_within_the_figure(frame):
    runs = {f"a run with a long name, number {place}": frame for place in range(6)}
    ax = viz.plot_metric(runs, "reward")
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    assert box.x1 <= ax.figure.bbox.x1
    assert box.y1 <= ax.figure.bbox.y1


def test_labels_stay_within_the_figure(frame):
    frame["throughput/tokens_per_s_per_device"] = 1.0
    ax = viz.plot_metric(frame, "throughput/tokens_per_s_per_device", smooth=5, target=1.1)
    ax.figure.canvas.draw()
    label = ax.yaxis.label.get_window_extent()
    assert label.y0 >= 0
    assert label.y1 <= ax.figure.bbox.y1


def test_viz_imports_neither_ray_nor_torch():
    code = (
        "import sys, rlkit.viz as viz, pandas as pd;"
        "viz.plot_reward(pd.DataFrame({'step': [0], 'reward': [1.0]}));"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))"
    )
    environment = {"MPLBACKEND": "Agg", "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "[]"
