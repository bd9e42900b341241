from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from test_style import DICHROMATS, cielab

from rlkit import viz
from rlkit.trace import CATEGORIES, Span, Trace
from rlkit.viz.memory import CATEGORY_COLOURS, STACK, memory_by_phase

GIB = 2**30


def memory(**gib):
    return {name: int(size * GIB) for name, size in gib.items()}


def frame_of(*rows):
    """(stage, worker, peak memory) each, as a trace's frame."""
    trace = Trace()
    for stage, worker, peak in rows:
        trace.add(Span(stage=stage, worker=worker, start_s=0.0, end_s=1.0, peak=peak))
    return trace.frame()


RUN = frame_of(
    ("update", "actor/0", memory(weights=1, optimizer=2, residual=0.5, allocated=3.5)),
    (
        "update",
        "actor/1",
        memory(weights=1, gradients=1, optimizer=2, residual=0.25, allocated=4.25),
    ),
    ("store/put", "actor/1", None),
    ("generate", "rollout/0", memory(weights=1, kv_cache=4, residual=0.5, allocated=5.5)),
)


def tidy(**phases):
    """phase -> {category: GiB}, as a plan gives it."""
    rows = [(phase, c, size * GIB) for phase, sizes in phases.items() for c, size in sizes.items()]
    return pd.DataFrame(rows, columns=["phase", "category", "bytes"])


def drawn(ax):
    """(category, bar) -> (bottom, height), of bars that have one."""
    found = {}
    for container in ax.containers:
        for patch in filter(lambda patch: patch.get_height(), container):
            bar = round(patch.get_x() + patch.get_width() / 2)
            found[container.get_label(), bar] = (patch.get_y(), patch.get_height())
    return found


def test_every_category_has_a_colour_and_the_rest_is_above_what_is_explained():
    assert set(STACK) == {*CATEGORIES, "residual"}
    assert STACK[-2:] == ("residual", "host_swap")


@pytest.mark.parametrize("sight", DICHROMATS)
def test_any_two_categories_differ_for_colour_blind_readers(sight):
    solid = [colour for name, colour in CATEGORY_COLOURS.items() if name != "host_swap"]
    seen = [cielab(colour, DICHROMATS[sight]) for colour in solid]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 15


def test_a_phase_is_its_fullest_sample_as_a_whole():
    table = memory_by_phase(RUN)
    assert list(table.index) == ["generate\nrollout", "update\nactor"]
    assert table.loc["update\nactor"].to_dict() == {
        "weights": 1,
        "gradients": 1,
        "optimizer": 2,
        "kv_cache": 0,
        "residual": 0.25,
    }


def test_parts_of_a_phase_belong_to_it_and_groups_are_told_apart():
    frame = frame_of(
        ("reshard/transfer", "actor/0", memory(weights=1, residual=1, allocated=2)),
        ("reshard/plan", "actor/0", memory(weights=1, residual=2, allocated=3)),
        ("reshard/transfer", "rollout/0", memory(gather_buffers=1, residual=1, allocated=2)),
    )
    table = memory_by_phase(frame)
    assert list(table.index) == ["reshard\nactor", "reshard\nrollout"]
    assert table.loc["reshard\nactor", "residual"] == 2


def test_bars_are_stacked_with_the_residual_on_top():
    bars = drawn(viz.plot_memory(RUN))
    assert bars["weights", 0] == (0, 1)
    assert bars["kv cache", 0] == (1, 4)
    assert bars["residual (unexplained)", 0] == (5, 0.5)
    assert ("gradients", 0) not in bars
    assert bars["gradients", 1] == (1, 1)


def test_the_limit_is_a_dashed_line_with_its_name_and_in_sight():
    ax = viz.plot_memory(RUN, limit_gib=64)
    (line,) = ax.lines
    assert line.get_linestyle() == "--"
    assert set(line.get_ydata()) == {64}
    assert [text.get_text() for text in ax.texts] == ["device limit 64 GiB"]
    assert ax.get_ylim()[1] > 64


def test_a_residual_below_zero_hangs_below_the_axis():
    ax = viz.plot_memory(tidy(update={"weights": 3, "residual": -1}))
    assert drawn(ax)["residual (unexplained)", 0] == (0, -1)
    assert ax.get_ylim()[0] < -1


def test_a_plans_phases_keep_their_order_and_host_memory_is_hatched():
    plan = tidy(swap={"weights": 2, "host_swap": 4}, naive={"weights": 2, "gather_buffers": 4})
    ax = viz.plot_memory(plan, source="simulated")
    assert [text.get_text() for text in ax.get_xticklabels()] == ["swap", "naive"]
    assert drawn(ax)["host swap (host memory)", 0] == (2, 4)
    hatched = {c.get_label() for c in ax.containers if c.patches[0].get_hatch()}
    assert hatched == {"host swap (host memory)"}
    assert ax.get_ylabel() == "memory of a worker [GiB], simulated"


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (None, TypeError, "got NoneType, need a pandas DataFrame"),
        (pd.DataFrame({"step": [1]}), ValueError, "got 1 rows without memory"),
        (frame_of(("update", "actor/0", None)), ValueError, "got 1 rows without memory"),
        (tidy(update={"cache": 1}), ValueError, r"category: got \['cache'\], need some of weights"),
        (pd.concat([tidy(a={"weights": 1})] * 2), ValueError, "1 of a phase and category that"),
        (tidy(a={"weights": float("nan")}), ValueError, "1 without bytes"),
        (tidy(), ValueError, "got 0 rows"),
    ],
)
def test_what_holds_no_memory_is_refused_and_draws_nothing(frame, error, message):
    with pytest.raises(error, match=message):
        viz.plot_memory(frame)
    assert not plt.get_fignums()


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_must_be_above_zero(limit):
    with pytest.raises(ValueError, match="limit_gib: got"):
        viz.plot_memory(RUN, limit_gib=limit)
