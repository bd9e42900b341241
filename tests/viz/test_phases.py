import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from rlkit import viz
from rlkit.viz.phases import phase_seconds


def bar_tops(ax):
    """Height of each stack, [bars]."""
    return sum(np.array([patch.get_height() for patch in container]) for container in ax.containers)


def labels(ax):
    return [container.get_label() for container in ax.containers]


def test_stacks_are_as_high_as_the_step(frame):
    frame["time/step_s"] = np.linspace(1, 2, len(frame))
    np.testing.assert_allclose(
        bar_tops(viz.plot_phases(frame, bars=len(frame))), frame["time/step_s"]
    )


def test_blocks_are_as_high_as_their_mean_step(frame):
    frame["time/step_s"] = np.linspace(1, 2, len(frame))
    means = frame["time/step_s"].to_numpy().reshape(4, 5).mean(axis=1)
    np.testing.assert_allclose(bar_tops(viz.plot_phases(frame, bars=4)), means)


def test_more_steps_than_bars_become_blocks_named_by_their_ends(frame):
    ax = viz.plot_phases(frame, bars=4)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0–4", "5–9", "10–14", "15–19"]
    assert ax.get_xlabel() == "step, mean of blocks of 5 [train steps]"


def test_few_steps_are_one_bar_each(frame):
    ax = viz.plot_phases(frame.head(3))
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "1", "2"]


@pytest.mark.parametrize("num_steps", [1, 11, 12, 13, 25])
def test_bars_never_exceed_their_number(frame, num_steps):
    frame = pd.concat([frame, frame]).head(num_steps).assign(step=range(num_steps))
    assert len(bar_tops(viz.plot_phases(frame))) <= 12


def test_axis_says_seconds_and_source(frame):
    ax = viz.plot_phases(frame, source="paper")
    assert ax.get_ylabel() == "time per step [s], paper"


def test_rest_of_the_step_is_other_and_on_top(frame):
    assert labels(viz.plot_phases(frame)) == ["generate", "update", "other"]
    assert phase_seconds(frame)["other"].to_numpy() == pytest.approx(0.2)


def test_logged_other_is_part_of_the_rest_not_added_to_it(frame):
    seconds = phase_seconds(frame.assign(**{"time/other_s": 0.1}))
    assert seconds["other"].to_numpy() == pytest.approx(0.2)


def test_missing_phase_seconds_go_to_other(frame):
    frame.loc[3, "time/generate_s"] = np.nan
    seconds = phase_seconds(frame).loc[3]
    assert (seconds["generate"], seconds["other"]) == pytest.approx((0.0, 0.7))


def test_phase_never_measured_is_not_drawn(frame):
    ax = viz.plot_phases(frame.assign(**{"time/score_s": np.nan}))
    assert "score" not in labels(ax)


def test_step_without_time_is_left_out(frame):
    frame.loc[0, ["time/step_s", "time/generate_s"]] = np.nan, 9.0
    assert bar_tops(viz.plot_phases(frame, bars=1)) == pytest.approx(1.0)


def test_without_step_time_the_phases_are_all_there_is(frame):
    ax = viz.plot_phases(frame.drop(columns="time/step_s"))
    assert bar_tops(ax) == pytest.approx(0.8)


def test_step_time_alone_is_all_other(frame):
    ax = viz.plot_phases(frame[["step", "time/step_s"]])
    assert labels(ax) == ["other"]


def test_phase_of_ones_own_is_drawn_below_other(frame):
    ax = viz.plot_phases(frame.assign(**{"time/save_s": 0.1}))
    assert labels(ax) == ["generate", "update", "save", "other"]


def test_overlapping_phases_show_the_step_as_a_tick(frame):
    ax = viz.plot_phases(frame.head(2).assign(**{"time/generate_s": 0.9}))
    assert bar_tops(ax) == pytest.approx(1.2)
    (ticks,) = ax.collections
    assert ticks.get_label() == "whole step (phases overlap)"
    assert {y for segment in ticks.get_segments() for _, y in segment} == {1.0}


def test_seeds_are_averaged(seeds):
    seeds["time/step_s"] = 1.0 + seeds["seed"]
    assert bar_tops(viz.plot_phases(seeds)) == pytest.approx(2.0)


def test_runs_by_name_are_one_bar_each(frame):
    ax = viz.plot_phases({"sync": frame, "async": frame.head(5).drop(columns="time/update_s")})
    assert [text.get_text() for text in ax.get_xticklabels()] == ["sync\nn = 20", "async\nn = 5"]
    assert labels(ax) == ["generate", "update", "other"]
    assert bar_tops(ax) == pytest.approx(1.0)


def test_frame_without_times_is_an_error(frame):
    with pytest.raises(ValueError, match="need 'time/step_s' or phases"):
        viz.plot_phases(frame[["step", "reward"]])
    assert not plt.get_fignums()


@pytest.mark.parametrize("bars", [0, 1.5, "all"])
def test_number_of_bars_must_be_whole(frame, bars):
    with pytest.raises((TypeError, ValueError), match="bars: got"):
        viz.plot_phases(frame, bars=bars)
