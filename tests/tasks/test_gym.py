import pickle
import sys

import pytest

import rlkit as rk

pytest.importorskip("reasoning_gym")


def last_word(response):
    return response.split()[-1] if response.split() else None


@pytest.fixture(scope="module")
def sums():
    return rk.tasks.from_reasoning_gym(
        "basic_arithmetic",
        size=60,
        seed=1,
        template="{question} Answer:",
        extract=last_word,
        min_digits=1,
        max_digits=1,
    )


def test_prompts_are_the_datasets_and_verdicts_too(sums):
    prompt, answer = sums.item(0)
    assert prompt.startswith("Calculate ")
    assert prompt.endswith(" Answer:")
    assert sums.verify(prompt, f"I think {answer}", answer) == 1.0
    assert sums.verify(prompt, "I think x", answer) == 0.0
    assert sums.verify(prompt, "", answer) == 0.0


def test_held_out_puzzles_are_never_trained_on(sums):
    training = {prompt for prompt, _ in sums.training}
    held_out = {prompt for prompt, _ in sums.other}
    assert training
    assert held_out
    assert not training & held_out


def test_a_verifier_travels_without_the_dataset(sums):
    prompt, answer = sums.item(3)
    sums.verify(prompt, answer, answer)
    again = pickle.loads(pickle.dumps(sums.verify))
    assert again._made is None
    assert again(prompt, answer, answer) == 1.0


def test_the_same_seed_gives_the_same_task(sums):
    def task(seed):
        return rk.tasks.from_reasoning_gym("basic_arithmetic", size=60, seed=seed)

    assert task(1).identity() == task(1).identity() != task(2).identity()


def test_an_unknown_dataset_is_answered_with_the_close_one():
    with pytest.raises(ValueError, match=r"got 'chain_sums', need one of .* mean 'chain_sum'"):
        rk.tasks.from_reasoning_gym("chain_sums")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match="pip install reasoning-gym"):
        rk.tasks.from_reasoning_gym("basic_arithmetic")
