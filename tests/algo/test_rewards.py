import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import (
    boxed_match,
    exact_match,
    format_reward,
    last_boxed,
    number_match,
    overlong_penalty,
)

REWARDS = (exact_match, boxed_match, format_reward, number_match)


@pytest.mark.parametrize(
    ("response", "reward"), [("321", 1), (" 321\n", 1), ("0321", 0), ("", 0), ("321 ok", 0)]
)
def test_exact_match_is_about_all_of_the_response(response, reward):
    assert exact_match("reverse 123", response, "321") == reward


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so 3 + 4 = 7", "7"),
        ("The answer is 7.", "7"),
        ("#### 1,234", "1234"),
        ("it costs $1,234.50", "1234.5"),
        ("it costs \\$18", "18"),
        ("x = -3", "-3"),
        ("x = −3", "-3"),  # U+2212
        ("5-3", "3"),
        ("a share of 1/2", "0.5"),
        (r"a share of \frac{3}{4}", "0.75"),
        (r"it is\frac{1}{2}", "1/2"),
        (r"-\dfrac{1}{2}", "-0.5"),
        ("2.5e3 metres", "2500"),
        ("50%", "50"),
        ("12apples", "12"),
        ("答案是12", "12"),
        ("it is .5", "0.5"),
        ("1{,}000", "1000"),
        ("1, 2, 3", "3"),
        ("42", "He had 42.0 in the end"),
    ],
)
def test_number_match_reads_the_last_number(response, answer):
    assert number_match("", response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("7 or 8", "7"),
        ("no number", "7"),
        ("", "7"),
        ("0.33", "1/3"),
        ("1/0", "1"),
        ("-7", "7"),
        ("x7", "7"),
        ("1e999999999", "1"),
        ("9" * 5000, "9"),
        (r"2\frac{1}{2}", "0.5"),
    ],
)
def test_number_match_refuses_other_numbers(response, answer):
    assert number_match("", response, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("50%", "50%", 1),
        ("50%", "0.5", 1),
        (r"50\%", "1/2", 1),
        ("50 percent", "0.5", 1),
        ("0.5", "50%", 1),
        ("50", "50%", 1),
        ("5000%", "50%", 0),
        ("0.5%", "50%", 0),
        ("0.5%", "0.005", 1),
        ("50", "0.5", 0),
    ],
)
def test_percent_is_a_unit_or_a_hundredth_of_a_number_without(response, answer, reward):
    assert number_match("", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "tolerance", "reward"),
    [
        ("0.333", "1/3", 1e-3, 1),
        ("0.333", "1/3", 1e-4, 0),
        ("3.14", "3.14159", 1e-2, 1),
        ("1001", "1000", 1e-3, 1),  # of numbers above 1 the tolerance is relative
        ("1001", "1000", 9e-4, 0),
        ("0.0011", "0.001", 1e-3, 1),
        ("33.3%", "1/3", 1e-3, 1),
    ],
)
def test_tolerance_is_the_largest_difference_allowed(response, answer, tolerance, reward):
    assert number_match("", response, answer, tolerance=tolerance) == reward


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_is_below_one(tolerance):
    with pytest.raises(ValueError, match=r"need 0 <= tolerance < 1"):
        number_match("", "1", "1", tolerance=tolerance)


@settings(deadline=None)
@given(st.integers(-999, 999), st.integers(-999, 999), st.floats(0, 0.49))
def test_a_larger_tolerance_never_refuses_what_a_smaller_one_took(number, answer, tolerance):
    row = ("", f"{number}", f"{answer}")
    rewards = [number_match(*row, tolerance=t) for t in (0.0, tolerance, 2 * tolerance)]
    assert rewards == sorted(rewards)


def test_number_match_without_a_number_in_the_answer_is_an_error():
    with pytest.raises(ValueError, match=r"answer: got 'blue', need text with a number"):
        number_match("", "7", "blue")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"first \boxed{1}, then \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ x + 1 }", "x+1"),
        (r"\boxed{\text{blue}}", "blue"),
        (r"\boxed {7}", "7"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{1{,}234}", "1234"),
        (r"\boxed{$7$}", "7"),
        (r"\boxed{50\%}", "50"),
        (r"\boxed{\left(1,\,2\right)}", "(1,2)"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{7.0}", "7"),
    ],
)
def test_boxed_match_compares_what_the_last_box_means(response, answer):
    assert boxed_match("", response, answer) == 1.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("42", "42"),
        (r"\boxed{42", "42"),
        (r"\boxed{42} or \boxed{43}", "42"),
        (r"\boxed{}", "42"),
        (r"\boxed", "42"),
        (r"\boxed{x}", "42"),
        (r"\boxed{42} \boxed{4", "42"),
    ],
)
def test_boxed_match_refuses_other_boxes(response, answer):
    assert boxed_match("", response, answer) == 0.0


def test_last_boxed_balances_inner_braces():
    assert last_boxed(r"\boxed{\frac{a}{b}} and more}") == r"\frac{a}{b}"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>why</think><answer>7</answer>", 1),
        ("\n<think>a\nb</think>\n\n<answer>7</answer>\n", 1),
        ("<think></think><answer></answer>", 1),
        ("<answer>7</answer><think>why</think>", 0),
        ("<think>why</think><answer>7</answer> so", 0),
        ("<think>why</think>", 0),
        ("<think>why<answer>7</answer>", 0),
        ("<think>a</think><think>b</think><answer>7</answer>", 0),
        ("<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("<think>a <answer>6</answer></think><answer>7</answer>", 0),
        ("", 0),
    ],
)
def test_format_reward_wants_each_tag_once_in_order(response, reward):
    assert format_reward("", response, "9") == reward


def test_format_reward_takes_any_pattern_and_wants_all_of_the_response():
    pattern = r"Answer: \d+\n.*"
    assert format_reward("", "Answer: 7\na\nb", "9", pattern=pattern) == 1
    assert format_reward("", "So. Answer: 7\n", "9", pattern=pattern) == 0


@given(st.text(max_size=40))
def test_every_text_has_the_format_of_its_own_pattern(text):
    assert format_reward("", text, "", pattern=re.escape(text)) == 1
    assert format_reward("", text + "x", "", pattern=re.escape(text)) == 0


@settings(deadline=None)
@given(st.text(max_size=200), st.integers(-999, 999))
def test_rewards_of_any_text_are_zero_or_one(response, answer):
    for fn in REWARDS:
        assert fn("", response, str(answer)) in (0.0, 1.0)


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,/eE+-−$\\{} frac", max_size=60))
def test_numbers_of_any_shape_are_read_or_refused(response):
    assert number_match("", response, "7") in (0.0, 1.0)
    assert boxed_match("", rf"\boxed{{{response}}}", "7") in (0.0, 1.0)


@settings(deadline=None)
@given(st.fractions(max_denominator=999).filter(lambda x: abs(x) < 10**9))
def test_number_match_accepts_any_fraction_written_out(fraction):
    assert number_match("", f"the answer is {fraction}", str(fraction)) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{" * 20_000,
        "<think>" + "a<" * 100_000,
        "1," * 100_000,
        "1,111" * 40_000,
        "9" * 200_000,
        r"\frac{1" * 30_000,
        "{" * 200_000,
    ],
)
def test_hostile_text_is_judged_without_blowing_up(response):
    assert [fn("", response, "7") for fn in REWARDS] == [0.0] * 4


def masks(*lengths, width=101):
    """Masks [B, width] with that many ones."""
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def test_overlong_penalty_is_a_ramp():  # faults B5
    got = overlong_penalty(masks(80, 81, 90, 100, 101), soft=80, hard=100)
    assert got.tolist() == pytest.approx([0, -0.05, -0.5, -1, -1])


def test_short_responses_have_no_penalty():
    assert overlong_penalty(masks(0, 1, 79), soft=80, hard=100).tolist() == [0, 0, 0]


def test_overlong_penalty_counts_the_mask_not_the_width():
    mask = masks(10)
    mask[0, 50:60] = True  # a tool's tokens between them are not the policy's
    assert torch.equal(
        overlong_penalty(mask, soft=10, hard=20), overlong_penalty(masks(20), soft=10, hard=20)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_overlong_penalty_takes_masks_of_any_dtype(dtype):
    got = overlong_penalty(masks(90).to(dtype), soft=80, hard=100)
    assert got.dtype == torch.float32
    assert got.tolist() == [-0.5]


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 60), st.integers(0, 150))
def test_longer_is_never_penalised_less(soft, ramp, length):
    shorter, longer = overlong_penalty(
        masks(length, length + 1, width=152), soft=soft, hard=soft + ramp
    ).tolist()
    assert -1 <= longer <= shorter <= 0


@pytest.mark.parametrize(("soft", "hard"), [(100, 100), (120, 100), (-1, 100)])
def test_soft_must_be_below_hard(soft, hard):
    with pytest.raises(ValueError, match=f"got soft={soft}, hard={hard}; need 0 <= soft < hard"):
        overlong_penalty(masks(90), soft=soft, hard=hard)


def test_a_verifier_gives_the_same_from_another_thread():  # faults I2
    calls = [("", "1/2", "0.5"), ("", "1/3", "0.5"), ("", r"\boxed{\frac{1}{2}}", "0.5")]
    with ThreadPoolExecutor(1) as pool:
        for verify in REWARDS:
            elsewhere = [pool.submit(verify, *call).result(timeout=20) for call in calls]
            assert elsewhere == [verify(*call) for call in calls]
    assert number_match("", "1/2", "0.5") == 1
