"""Rewards by symbolic mathematics."""

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.rewards import Killable, close, math_verify
from rlkit.rewards.mathematics import equal

patient = Killable(equal, timeout_s=60)  # for a loaded machine


@pytest.fixture(autouse=True, scope="module")
def closed():
    yield
    close()


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("1/2", "0.5", 1),
        (r"so it is $\frac{2}{4}$", "1/2", 1),
        (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1),
        (r"\boxed{\frac12}", r"\frac{1}{2}", 1),
        (r"\boxed{(1, 2)}", "$(1,2)$", 1),
        ("first 3, then 4", "4", 1),
        (r"\boxed{x+1}", "$x-1$", 0),
        ("no number", "0.5", 0),
        ("", "0.5", 0),
        ("<script>", "0.5", 0),
    ],
)
def test_expressions_are_compared_by_what_they_mean(response, answer, reward):
    assert patient("", response, answer) == reward


def test_a_thread_gets_what_the_main_thread_gets():  # faults I2
    found = []
    thread = threading.Thread(target=lambda: found.append(math_verify("", "1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [math_verify("", "1/2", "0.5")] == [1.0]


def test_a_tower_of_powers_is_a_timeout_not_a_zero():
    verdict = math_verify("", "$9^{9^{9^{9}}}$", "1")
    assert (math.isnan(verdict), verdict.outcome) == (True, "timeout")
    assert math_verify("", "$2$", "2") == 1.0


@pytest.mark.parametrize("answer", ["hello world", ""])
def test_an_answer_that_is_no_mathematics_is_an_error(answer):
    with pytest.raises(RuntimeError, match="need a number or an expression that math-verify reads"):
        math_verify("", "1", answer)


@settings(max_examples=20, deadline=None)
@given(st.fractions(max_denominator=99).filter(lambda x: abs(x) < 1000), st.integers(2, 9))
def test_a_fraction_not_in_lowest_terms_is_the_same_number(x, k):
    response = rf"$\frac{{{x.numerator * k}}}{{{x.denominator * k}}}$"
    assert patient("", response, f"{x.numerator}/{x.denominator}") == 1.0
