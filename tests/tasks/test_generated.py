import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit as rk
from rlkit.tasks.generated import evaluate_arithmetic, reaches_target

TASKS = {
    "reverse_digits": rk.tasks.reverse_digits,
    "sort": rk.tasks.sort,
    "add": rk.tasks.add,
    "countdown": rk.tasks.countdown,
    "countdown of 2": lambda **more: rk.tasks.countdown(numbers=2, **more),
    "countdown of 4": lambda **more: rk.tasks.countdown(numbers=4, **more),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_passes_the_verifier(name):
    task = TASKS[name]()
    for i in range(100):
        prompt, answer = task.item(i)
        assert task.verify(prompt, answer, answer) == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_a_wrong_or_empty_response_fails_the_verifier(name):
    task = TASKS[name]()
    for response in ("", " ", "x", "0" * 500, "(" * 500, "-"):
        assert task.verify(*task.item(0)[:1], response, task.item(0)[1]) == 0.0


@pytest.mark.parametrize("name", TASKS)
def test_the_tokenizer_knows_every_character(name):
    task = TASKS[name]()
    for i in range(50):
        for text in task.item(i):
            assert task.tokenizer.decode(task.tokenizer.encode(text)) == text


def test_reversal_is_to_the_character():
    prompt, answer = rk.tasks.reverse_digits(length=4).item(0)
    assert (len(prompt), prompt[-1], answer) == (5, ">", prompt[-2::-1])
    verify = rk.tasks.reverse_digits().verify
    assert verify(prompt, answer + " ", answer) == 0.0


def test_sorting_sorts():
    prompt, answer = rk.tasks.sort(length=8).item(0)
    assert list(answer) == sorted(prompt[:-1])


def test_a_sum_has_its_zeros_in_front():
    for i in range(50):
        prompt, answer = rk.tasks.add(digits=2).item(i)
        a, b = prompt.rstrip("=").split("+")
        assert (len(a), len(b), len(answer)) == (2, 2, 3)
        assert int(a) + int(b) == int(answer)


# ---- countdown ----


@pytest.mark.parametrize(
    "response",
    ["(7+2)*5", "5*(2+7)", "(2+7)*5", " ( 7 + 2 ) * 5 ", "((7+2))*5"],
)
def test_countdown_takes_any_right_expression_of_the_numbers(response):
    assert reaches_target("7 2 5=45>", response, "(7+2)*5") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "45",
        "9*5",  # other numbers
        "(7+2)*5*1",  # one more
        "5*2+5*7",  # one of them twice
        "7+2*5",  # another value
        "(72-27)",  # digits run together
        "(7+2)*5=45",
        "(7+2)*5>",
        "(7+2)*5\n",
        "(07+2)*5",
        "(7+2)*5.0",
        "(7+2)(5)",
        "(7+2)*5 7",
        "(7,2,5)",
        "(\u0667+2)*5",  # an Arabic digit seven
        "(\uff17+2)*5",  # a full-width one
        "(7+2)*5" + " " * 60,
        "(" * 30 + "(7+2)*5" + ")" * 30,
        "7**2**5",
        "9**9**9",
        "7* *2*5",
        "7//2+5",
        "-(-(7+2)*5)",
        "__import__('os')",
        "7 if 2 else 5",
        "(7+2)*5" * 100_000,
    ],
)
def test_countdown_refuses(response):
    assert reaches_target("7 2 5=45>", response, "(7+2)*5") == 0.0


def test_countdown_compares_the_numbers_as_many_times_as_they_are_given():
    assert reaches_target("3 3 2=08>", "3+3+2", "") == 1.0
    assert reaches_target("3 3 2=08>", "3+3+2+2-2", "") == 0.0


@given(st.text(alphabet="0123456789+-*() ", max_size=20))
def test_an_expression_is_worth_what_python_says_or_nothing(text):
    value = evaluate_arithmetic(text)
    assert value is None or value == eval(text.strip())


@given(st.text(max_size=80))
def test_any_text_is_judged_without_an_error(text):
    assert reaches_target("7 2 5=45>", text, "") in (0.0, 1.0)


# ---- sizes ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rk.tasks.reverse_digits(length=0), "length: got 0, need an integer from 1 to 40"),
        (lambda: rk.tasks.sort(length=41), "length: got 41"),
        (lambda: rk.tasks.add(digits=2.0), "digits: got 2.0, need an integer"),
        (lambda: rk.tasks.countdown(numbers=5), "numbers: got 5, need an integer from 2 to 4"),
    ],
)
def test_a_size_out_of_range_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_countdown_targets_are_two_digits():
    for i in range(100):
        target = int(rk.tasks.countdown().item(i)[0].rstrip(">").split("=")[1])
        assert 0 <= target <= 99
        assert not math.isnan(target)
