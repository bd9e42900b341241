"""The picture of a dock: colours of cells, bars, labels, for any number of rows."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_hex

from rlkit.dock import LocalTransport, TransferDock
from rlkit.viz import plot_dock
from rlkit.viz.dock import HOLDER_COLOURS, OTHERS, STATE_COLOURS, bytes_by_node


def make_dock(num_rows, *, num_read=0, holders=("actor/0",)):
    """Rows of 8 bytes on node a, the first ``num_read`` with 16 more on b and leased in turn."""
    dock = TransferDock(LocalTransport(("a", "b")), timeout_s=0)
    if num_rows:
        uids = np.arange(num_rows)
        dock.put({"prompt_ids": [torch.ones(1, dtype=torch.int64)] * num_rows}, uids,
                 policy_version=uids // 2)  # fmt: skip
    if num_read:
        ids = [torch.ones(2, dtype=torch.int64)] * num_read
        dock.at(node="b").put({"response_ids": ids}, range(num_read))
        for holder in holders:
            dock.at(holder=holder).get("train", ["response_ids"], num_read // len(holders))
    return dock


def cell_colours(ax):
    """[R, C] colours of the picture."""
    (image,) = ax.images
    return np.apply_along_axis(to_hex, 2, np.asarray(image.get_array()))


def legend(axes):
    (found,) = axes["columns"].figure.legends
    return {t.get_text(): to_hex(h.get_facecolor()) for t, h in zip(
        found.get_texts(), found.legend_handles, strict=True)}  # fmt: skip


@pytest.mark.parametrize("num_rows", [0, 1, 8, 8192])
def test_any_number_of_rows_is_drawn(num_rows):
    axes = plot_dock(make_dock(num_rows, num_read=num_rows // 2).frame())
    assert set(axes) == {"columns", "stages", "bytes", "versions"}
    axes["bytes"].get_figure(root=True).canvas.draw()
    assert all(ax.get_xlabel() for ax in axes.values())
    assert sum(bar.get_height() for bar in axes["versions"].patches) == num_rows


def test_a_cell_has_the_colour_of_what_it_says():
    axes = plot_dock(make_dock(8, num_read=3).frame())
    columns, stages = cell_colours(axes["columns"]), cell_colours(axes["stages"])
    there, empty = STATE_COLOURS["there"], STATE_COLOURS["empty"]
    assert columns[:, 0].tolist() == [there] * 8
    assert columns[:, 1].tolist() == [there] * 3 + [empty] * 5
    leased, waiting = HOLDER_COLOURS[0], STATE_COLOURS["waiting"]
    assert stages[:, 0].tolist() == [leased] * 3 + [waiting] * 5
    assert legend(axes) == {
        "there": there, "empty": empty, "waiting": waiting, "leased by actor/0": leased,
    }  # fmt: skip
    assert [t.get_text() for t in axes["columns"].get_yticklabels()] == list("01234567")


def test_holders_beyond_the_fourth_share_a_colour():
    holders = [f"actor/{i}" for i in range(6)]
    axes = plot_dock(make_dock(6, num_read=6, holders=holders).frame())
    assert len(set(legend(axes).values())) == len(legend(axes))
    assert list(legend(axes))[1:] == [*(f"leased by actor/{i}" for i in range(4)), OTHERS]


def test_of_many_rows_a_line_is_the_mean_of_several():
    frame = make_dock(8192).frame()
    frame.loc[frame["uid"] % 2 == 1, "prompt_ids"] = "empty"
    axes = plot_dock(frame)
    (image,) = axes["columns"].images
    mixed = np.asarray(image.get_array())
    assert len(mixed) == 400
    both = [np.array(plt.matplotlib.colors.to_rgb(STATE_COLOURS[s])) for s in ("there", "empty")]
    np.testing.assert_allclose(mixed[:, 0], np.tile(sum(both) / 2, (400, 1)), atol=0.02)


def test_bytes_are_those_of_the_nodes():
    frame = make_dock(8, num_read=3).frame()
    assert bytes_by_node(frame).to_dict() == {"a": 64, "b": 48}
    axes = plot_dock(frame)
    assert [bar.get_height() for bar in axes["bytes"].patches] == [64, 48]
    assert axes["bytes"].get_ylabel() == "values [B], measured"
    assert plot_dock(frame, source="simulated")["bytes"].get_ylabel() == "values [B], simulated"


def test_bytes_have_a_fitting_unit_and_long_names_of_nodes_are_cut():
    node = "bytes:" + "01234567" * 7
    frame = make_dock(8).frame().rename(columns={"bytes:a": node})
    frame[node] = 2**20
    ax = plot_dock(frame)["bytes"]
    assert ax.get_ylabel() == "values [MiB], measured"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["01234567"]


def test_figures_after_it_look_as_before():
    before = plt.rcParams.copy()
    plot_dock(make_dock(1).frame())
    assert plt.rcParams == before


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: plot_dock(make_dock(1)), TypeError, r"Pass dock\.frame\(\)"),
        (lambda: plot_dock(pd.DataFrame({"uid": [1]})), ValueError, "without group, version"),
        (lambda: plot_dock(make_dock(1).frame(), source="guess"), ValueError, "source: got"),
    ],
)
def test_wrong_calls_say_what_is_needed_and_leave_no_figure(call, error, match):
    with pytest.raises(error, match=match):
        call()
    assert not plt.get_fignums()
