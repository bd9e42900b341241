import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import has_signal
from rlkit.batch import Batch
from rlkit.tasks import fill_groups


class Prompts:
    """Groups of two responses with the rewards given, one group after another."""

    def __init__(self, *groups):
        self.groups, self.asked, self.place = groups, [], 0

    def __call__(self, num):
        self.asked.append(num)
        ids = [self.place + i for i in range(num)]
        self.place += num
        rewards = [self.groups[i % len(self.groups)] for i in ids]
        return Batch.from_columns(
            {
                "uid": [2 * i + k for i in ids for k in range(2)],
                "group_ids": [i for i in ids for _ in range(2)],
                "rewards": torch.tensor(rewards).reshape(-1),
            }
        )


def signal(group):
    return bool(has_signal(group["rewards"], group["group_ids"]).any())


LIVE, DEAD = (1.0, 0.0), (1.0, 1.0)


def test_groups_without_signal_for_ever_are_an_error_that_says_so():  # faults D1
    prompts = Prompts(DEAD)
    with pytest.raises(RuntimeError, match=r"got 0 of the 4 groups needed after 10 rounds and 40"):
        fill_groups(prompts, signal, num_groups=4)
    assert len(prompts.asked) == 10


def test_the_error_has_the_mean_of_the_column():  # faults D1
    with pytest.raises(RuntimeError, match=r"mean of rewards 1\)"):
        fill_groups(Prompts(DEAD), signal, num_groups=2, max_rounds=1)


def test_a_short_batch_by_choice():  # faults D1
    prompts = Prompts(LIVE, DEAD, DEAD)
    got = fill_groups(prompts, signal, num_groups=3, max_rounds=1, allow_short=True).batch
    assert got["group_ids"].tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="got 0 of"):
        fill_groups(Prompts(DEAD), signal, num_groups=3, max_rounds=1, allow_short=True)


def test_what_was_filtered_is_drawn_again():  # faults D2
    prompts = Prompts(LIVE, LIVE, DEAD, LIVE, LIVE, LIVE)
    got = fill_groups(prompts, signal, num_groups=4).batch
    assert prompts.asked == [4, 1]
    assert got["group_ids"].unique().tolist() == [0, 1, 3, 4]
    assert len(got) == 8


def test_groups_beyond_the_number_needed_are_the_next_calls():  # faults D2
    prompts = Prompts(LIVE)
    first = fill_groups(lambda num: prompts(5), signal, num_groups=4)
    assert first.batch["group_ids"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert first.surplus["group_ids"].tolist() == [4, 4]
    second = fill_groups(lambda num: prompts(5), signal, num_groups=4, surplus=first.surplus)
    assert second.batch["group_ids"].tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert second.surplus["group_ids"].tolist() == [8, 8, 9, 9]
    assert second.metrics["sampling/num_carried"] == 1


def test_enough_surplus_needs_no_round():
    surplus = Prompts(LIVE)(3)
    got = fill_groups(None, signal, num_groups=2, surplus=surplus)
    assert got.batch["group_ids"].tolist() == [0, 0, 1, 1]
    assert got.surplus["group_ids"].tolist() == [2, 2]
    assert got.metrics == {
        "sampling/num_rounds": 0,
        "sampling/num_responses": 0,
        "sampling/num_carried": 3,
        "sampling/kept_fraction": pytest.approx(math.nan, nan_ok=True),
        "sampling/accuracy": pytest.approx(math.nan, nan_ok=True),
    }


@given(
    lives=st.lists(st.booleans(), min_size=1, max_size=12).filter(any),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    more=st.integers(0, 3),
)
def test_every_group_with_signal_is_trained_once_and_whole(lives, sizes, more):
    prompts = Prompts(*[LIVE if live else DEAD for live in lives])
    trained, surplus = [], None
    for num_groups in sizes:
        filled = fill_groups(
            lambda num: prompts(num + more), signal, num_groups=num_groups, surplus=surplus,
            max_rounds=100,
        )  # fmt: skip
        assert len(filled.batch) == 2 * num_groups
        trained += filled.batch.uids.tolist()
        surplus = filled.surplus
    left = [] if surplus is None else surplus.uids.tolist()
    drawn = [i for i in range(prompts.place) if lives[i % len(lives)]]
    assert trained + left == [2 * i + k for i in drawn for k in range(2)]


def test_rounds_are_counted():
    metrics = fill_groups(Prompts(LIVE, LIVE, DEAD, LIVE), signal, num_groups=4).metrics
    assert metrics == {
        "sampling/num_rounds": 2,
        "sampling/num_responses": 10,
        "sampling/num_carried": 0,
        "sampling/kept_fraction": 0.8,
        "sampling/accuracy": 0.6,
    }


def shaped(num):
    """Two groups that are all wrong, whose penalty differs, then one with a right answer."""
    return Batch.from_columns(
        {
            "group_ids": [0, 0, 1, 1, 2, 2],
            "accuracy": [0.0, 0.0, 0.0, 0.0, 1.0, 0.0],
            "rewards": [-0.1, -0.2, 0.0, -0.3, 1.0, -0.5],
        }
    )


def test_the_filter_reads_the_accuracy_not_the_shaped_reward():  # faults A11
    keep = lambda group: bool(has_signal(group["accuracy"], group["group_ids"]).any())
    got = fill_groups(shaped, keep, num_groups=1, column="accuracy")
    assert got.batch["group_ids"].tolist() == [2, 2]
    with pytest.raises(RuntimeError, match=r"got 1 of the 2 .* \(mean of accuracy 0.167\)"):
        fill_groups(shaped, keep, num_groups=2, column="accuracy", max_rounds=1)


def test_failures_are_not_in_the_accuracy():
    prompts = Prompts((1.0, math.nan), (math.inf, 0.0))
    metrics = fill_groups(prompts, lambda group: True, num_groups=2).metrics
    assert metrics["sampling/accuracy"] == 0.5
    metrics = fill_groups(Prompts((math.nan,) * 2), lambda group: True, num_groups=1).metrics
    assert math.isnan(metrics["sampling/accuracy"])


@pytest.mark.parametrize("yes", [True, np.bool_(True), torch.tensor(True)])
def test_a_filter_says_yes_or_no(yes):
    assert len(fill_groups(Prompts(LIVE), lambda group: yes, num_groups=1).batch) == 2


@pytest.mark.parametrize(
    ("kept", "got"),
    [
        (torch.tensor([True, False]), r"Tensor of shape \(2,\)"),
        (math.nan, "nan"),
        (torch.tensor(math.nan), "nan"),
        (None, "None"),
    ],
)
def test_a_filter_that_says_anything_else_is_an_error_that_names_the_group(kept, got):
    with pytest.raises(TypeError, match=f"keep: got {got} for group 0, need True or False, one"):
        fill_groups(Prompts(LIVE), lambda group: kept, num_groups=1)


def test_a_filter_that_fails_names_the_group():
    with pytest.raises(ZeroDivisionError) as caught:
        fill_groups(Prompts(LIVE), lambda group: 1 // (2 - int(group.uids[0])) > 0, num_groups=2)
    assert "keep failed on group 1, of 2 responses" in caught.value.__notes__[0]


def test_rounds_without_prompts_ask_for_prompts():
    empty = Prompts(LIVE)(1).select([])
    with pytest.raises(RuntimeError, match=r"and 0 prompts .*\. Let sample\(num\) return num"):
        fill_groups(lambda num: empty, signal, num_groups=1)


def test_no_groups_needed_is_an_error():
    with pytest.raises(ValueError, match="got num_groups=0, max_rounds=10; need at least 1"):
        fill_groups(Prompts(LIVE), signal, num_groups=0)
