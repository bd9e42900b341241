import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from rlkit import viz


def test_reward_axis_says_quantity_unit_and_source(frame):
    ax = viz.plot_reward(frame.drop(columns="eval/accuracy"), source="simulated")
    assert ax.get_ylabel() == "reward [1], simulated"
    assert ax.get_xlabel() == "step [train steps]"


def test_throughput_axis_carries_the_glossary_unit(frame):
    assert viz.plot_throughput(frame).get_ylabel() == "throughput [tokens/s], measured"


def test_throughput_axis_starts_at_zero(frame):
    assert viz.plot_throughput(frame).get_ylim()[0] == 0


def test_throughput_per_device_is_another_column(frame):
    frame = frame.assign(**{"throughput/tokens_per_s_per_device": 250.0})
    ax = viz.plot_throughput(frame, per_device=True)
    assert set(ax.get_lines()[0].get_ydata()) == {250.0}
    assert "[tokens/s/device]" in ax.get_ylabel()


def test_missing_throughput_says_what_to_do(frame):
    with pytest.raises(ValueError, match="Pass per_device=False"):
        viz.plot_throughput(frame, per_device=True)


def test_metric_outside_the_glossary_takes_its_unit_from_its_name(frame):
    frame = frame.assign(**{"my/peak_gib": 3.0})
    assert viz.plot_metric(frame, "my/peak_gib").get_ylabel() == "my/peak_gib [GiB], measured"


def test_line_shows_the_column(frame):
    line = viz.plot_metric(frame, "reward").get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), frame["reward"])
    np.testing.assert_allclose(line.get_xdata(), frame["step"])


def test_rows_are_drawn_in_the_order_of_their_steps(frame):
    line = viz.plot_metric(frame.iloc[::-1], "reward").get_lines()[0]
    np.testing.assert_allclose(line.get_ydata(), frame["reward"])


def test_accuracy_is_drawn_only_where_it_was_evaluated(frame):
    dots = viz.plot_reward(frame.assign(reward=0.5)).get_lines()[1]
    np.testing.assert_allclose(dots.get_xdata(), [4, 9, 14, 19])
    np.testing.assert_allclose(dots.get_ydata(), [0.04, 0.09, 0.14, 0.19])


def test_large_rewards_leave_the_accuracy_an_axis_of_its_own(frame):
    ax = viz.plot_reward(frame.assign(reward=10.0))
    left, right = ax.figure.axes
    assert (left, right.get_ylabel()) == (ax, "evaluation accuracy [1], measured")


def test_small_rewards_share_the_axis_with_the_accuracy(frame):
    ax = viz.plot_reward(frame.assign(reward=0.5))
    assert ax.figure.axes == [ax]
    assert ax.get_ylabel() == "reward [1], accuracy [1], measured"


def test_evaluations_that_never_happened_are_not_in_the_legend(frame):
    ax = viz.plot_reward(frame.assign(**{"eval/accuracy": np.nan}))
    assert ax.get_legend() is None


def test_seeds_make_one_mean_line_and_its_n_in_the_label(seeds):
    ax = viz.plot_metric(seeds, "reward")
    (line,) = ax.get_lines()
    np.testing.assert_allclose(line.get_ydata(), np.arange(20) / 10 + 1)
    assert line.get_label() == "mean ± std, n = 3 seeds"


def test_band_is_one_standard_deviation_over_seeds(seeds):
    (band,) = viz.plot_metric(seeds, "reward").collections
    corners = band.get_paths()[0].vertices
    at_first_step = corners[corners[:, 0] == 0, 1]
    assert (at_first_step.min(), at_first_step.max()) == pytest.approx((0.0, 2.0))


def test_seeds_of_different_length_say_both_counts(seeds):
    shorter = seeds[(seeds["seed"] > 0) | (seeds["step"] < 10)]
    (line,) = viz.plot_metric(shorter, "reward").get_lines()
    assert "n = 2 to 3 seeds" in line.get_label()


def test_one_seed_has_no_band(frame):
    assert not viz.plot_metric(frame.assign(seed=0), "reward").collections


def test_runs_by_name_are_lines_by_name(frame, seeds):
    ax = viz.plot_metric({"GRPO": seeds, "DAPO": frame}, "reward")
    labels = [line.get_label() for line in ax.get_lines()]
    assert labels == ["GRPO (mean ± std, n = 3 seeds)", "DAPO"]


def test_runs_side_by_side_differ_in_colour(frame):
    lines = viz.plot_metric({"a": frame, "b": frame}, "reward").get_lines()
    assert lines[0].get_color() != lines[1].get_color()


def test_target_is_a_labelled_dashed_line(frame):
    ax = viz.plot_metric(frame, "reward", target=0.9)
    assert [text.get_text() for text in ax.texts] == ["target 0.9"]
    assert ax.get_lines()[-1].get_linestyle() == "--"


def test_smoothing_is_the_mean_of_the_last_steps_and_says_so(frame):
    ax = viz.plot_metric(frame, "reward", smooth=3)
    raw, mean = ax.get_lines()
    assert mean.get_ydata()[:4] == pytest.approx([0.0, 0.05, 0.1, 0.2])
    np.testing.assert_allclose(raw.get_ydata(), frame["reward"])
    assert "mean of last 3 steps" in ax.get_ylabel().replace("\n", " ")


def test_a_value_gone_missing_leaves_a_gap(frame):
    frame.loc[7, "reward"] = np.nan
    line = viz.plot_metric(frame, "reward", smooth=3).get_lines()[1]
    assert np.isnan(line.get_ydata()[7])
    assert np.isfinite(line.get_ydata()[8])


def test_lone_values_are_dots(frame):
    (line,) = viz.plot_metric(frame, "eval/accuracy").get_lines()
    assert (line.get_marker(), len(line.get_xdata())) == ("o", 4)


def test_given_axes_are_drawn_on(frame):
    _, axes = plt.subplots(1, 2)
    assert viz.plot_reward(frame, ax=axes[1]) is axes[1]
    assert not axes[0].get_lines()


@pytest.mark.parametrize("not_a_frame", [None, 3, [1, 2], "log"])
def test_what_is_no_frame_is_a_type_error(not_a_frame):
    with pytest.raises(TypeError, match=r"frame: got .*, need a pandas DataFrame"):
        viz.plot_reward(not_a_frame)


def test_a_log_in_place_of_its_frame_is_told_how_to_get_it():
    class Log:
        def frame(self):
            return pd.DataFrame()

    with pytest.raises(TypeError, match=r"Pass log\.frame\(\)"):
        viz.plot_reward(Log())


def test_missing_column_is_named_beside_those_there(frame):
    with pytest.raises(ValueError, match=r"got columns step, reward, .* need 'policy/kl_ref'"):
        viz.plot_metric(frame, "policy/kl_ref")


def test_frame_without_step_is_an_error(frame):
    with pytest.raises(ValueError, match="need 'step'"):
        viz.plot_reward(frame.drop(columns="step"))


def test_empty_frame_is_an_error():
    with pytest.raises(ValueError, match="got no rows"):
        viz.plot_reward(pd.DataFrame({"step": [], "reward": []}))


def test_dict_without_runs_is_an_error():
    with pytest.raises(ValueError, match="dict without runs"):
        viz.plot_reward({})


def test_text_is_no_curve(frame):
    with pytest.raises(ValueError, match=r"actor/loss_hash: got .* need a column of numbers"):
        viz.plot_metric(frame, "actor/loss_hash")


def test_column_of_nans_is_an_error(frame):
    with pytest.raises(ValueError, match="without one finite number"):
        viz.plot_metric(frame.assign(reward=np.nan), "reward")


def test_same_step_twice_without_seeds_is_an_error(frame):
    with pytest.raises(ValueError, match="Add a `seed` column"):
        viz.plot_reward(pd.concat([frame, frame]))


def test_unknown_source_is_an_error(frame):
    with pytest.raises(ValueError, match="source: got 'guessed', need one of measured"):
        viz.plot_reward(frame, source="guessed")


@pytest.mark.parametrize("smooth", [0, -1, 2.5, True])
def test_smoothing_needs_a_whole_number_of_steps(frame, smooth):
    with pytest.raises((TypeError, ValueError), match="smooth: got"):
        viz.plot_reward(frame, smooth=smooth)


def test_bad_input_leaves_no_figure(frame):
    with pytest.raises(ValueError, match="need 'nothing'"):
        viz.plot_metric(frame, "nothing")
    assert not plt.get_fignums()
