import re

import numpy as np
import pandas as pd
import pytest

from rlkit.viz.page import MAX_POINTS, page_html, thin
from rlkit.viz.summary import Summary, duration, summarise, terminal_line


def page(frame, **options):
    return page_html(frame, summarise(frame, **options))


def segments(html):
    """Widths of the phase bar's parts."""
    return [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]


def test_summary_is_of_the_last_step_and_of_the_last_five(frame):
    summary = summarise(frame, total_steps=40)
    assert (summary.step, summary.num_done, summary.num_total) == (19, 20, 40)
    assert (summary.reward, summary.reward_recent) == pytest.approx((1.9, 1.7))
    assert (summary.tokens_per_s, summary.step_s, summary.accuracy) == (1000.0, 1.0, 0.19)


def test_time_left_is_the_steps_left_at_the_recent_pace(frame):
    assert summarise(frame, total_steps=40).left_s == 20.0
    assert summarise(frame).left_s is None


def test_more_steps_than_planned_are_not_more_than_all(frame):
    summary = summarise(frame, total_steps=10)
    assert (summary.num_done, summary.left_s) == (10, 0.0)


def test_seconds_between_rows_stand_in_for_a_missing_step_time(frame):
    assert summarise(frame.drop(columns="time/step_s"), row_s=0.25).step_s == 0.25


def test_a_reward_gone_nan_is_shown_not_hidden(frame):
    frame.loc[19, "reward"] = np.nan
    assert "reward nan" in terminal_line(summarise(frame))
    assert ">nan<" in page(frame)


def test_line_is_ascii_and_holds_the_numbers(frame):
    line = terminal_line(summarise(frame, total_steps=40))
    assert line == (
        "step 19 (20/40) | reward 1.900 (last 5: 1.700) | accuracy 0.190 | 1,000 tokens/s"
        " | 1 s/step | 20 s left"
    )
    assert line.isascii()


def test_line_before_the_first_step():
    assert terminal_line(Summary()) == "waiting for the first step"


@pytest.mark.parametrize(
    ("seconds", "text"), [(41.6, "42 s"), (185, "3 min 05 s"), (7830, "2 h 10 min")]
)
def test_durations_read_as_words(seconds, text):
    assert duration(seconds) == text


def test_page_of_an_empty_log_waits():
    assert "waiting for the first step" in page(pd.DataFrame({"step": []}), total_steps=3)


def test_page_shows_numbers_units_and_source(frame):
    html = page(frame)
    assert "tokens/s" in html
    assert "reward [1]" in html
    assert "step [train steps], measured" in html
    assert "generate 0.5 s (50 %)" in html


def test_page_without_reward_says_how_to_log_one(frame):
    assert "log.add(step, metrics, reward=...)" in page(frame[["step", "time/step_s"]])


def test_phase_bar_is_cut_in_proportion(frame):
    parts = segments(page(frame))
    assert [width / sum(parts) for width in parts] == pytest.approx([0.5, 0.3, 0.2], abs=0.001)


def test_page_without_recent_times_has_no_phase_bar(frame):
    frame[["time/generate_s", "time/update_s", "time/step_s"]] = np.nan
    assert segments(page(frame)) == []


def test_text_from_outside_is_escaped(frame):
    html = page(frame.assign(**{"time/<script>alert(1)</script>_s": 0.1}))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_page_does_not_grow_with_the_run():
    step = np.arange(50_000)
    frame = pd.DataFrame({"step": step, "reward": np.sin(step), "eval/accuracy": 0.5})
    assert len(page(frame)) < 30_000


def test_repeated_steps_are_drawn_one_after_the_other(frame):
    html = page(pd.concat([frame, frame], ignore_index=True))
    assert ">39</text>" in html


def test_a_missing_reward_is_a_gap_in_the_line(frame):
    whole, gap = page(frame), page(frame.assign(reward=frame["reward"].mask(frame["step"] == 7)))
    assert gap.count("M", gap.index("<path d=")) > whole.count("M", whole.index("<path d="))


@pytest.mark.parametrize("reward", [[np.nan] * 3, [np.inf, 1.0, -np.inf], [0.0] * 3])
def test_odd_rewards_make_no_odd_coordinates(reward):
    html = page(pd.DataFrame({"step": [0, 1, 2], "reward": reward}))
    for numbers in re.findall(r' d="([^"]*)"', html):
        assert "nan" not in numbers
        assert "inf" not in numbers


def test_thinning_keeps_means_and_the_last_step():
    x = np.arange(1000.0)
    thin_x, thin_y = thin(x, 2 * x, 10)
    assert len(thin_x) == 10
    assert thin_x[-1] == 999
    assert thin_y[0] == pytest.approx(2 * np.mean(np.arange(100)))


def test_short_curves_are_not_thinned():
    x = np.arange(float(MAX_POINTS))
    assert len(thin(x, x)[0]) == MAX_POINTS


def test_thinning_ignores_missing_values_and_keeps_whole_gaps():
    y = np.ones(1000)
    y[::2] = np.nan
    y[300:400] = np.nan
    thin_y = thin(np.arange(1000.0), y, 10)[1]
    assert np.isnan(thin_y[3])
    assert np.delete(thin_y, 3) == pytest.approx(1.0)
