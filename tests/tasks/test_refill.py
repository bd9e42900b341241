import pytest
import torch

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


def test_the_error_has_the_mean_reward():  # faults D1
    with pytest.raises(RuntimeError, match=r"mean reward 1\)"):
        fill_groups(Prompts(DEAD), signal, num_groups=2, max_rounds=1)


def test_a_short_batch_by_choice():  # faults D1
    prompts = Prompts(LIVE, DEAD, DEAD)
    got = fill_groups(prompts, signal, num_groups=3, max_rounds=1, allow_short=True)
    assert got["group_ids"].tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="got 0 of"):
        fill_groups(Prompts(DEAD), signal, num_groups=3, max_rounds=1, allow_short=True)


def test_what_was_filtered_is_drawn_again():  # faults D2
    prompts = Prompts(LIVE, LIVE, DEAD, LIVE, LIVE, LIVE)
    got = fill_groups(prompts, signal, num_groups=4)
    assert prompts.asked == [4, 1]
    assert got["group_ids"].unique().tolist() == [0, 1, 3, 4]
    assert len(got) == 8


def test_groups_beyond_the_number_needed_are_left_out():  # faults D2
    prompts = Prompts(LIVE)
    got = fill_groups(lambda num: prompts(num + 3), signal, num_groups=4)
    assert got["group_ids"].unique().tolist() == [0, 1, 2, 3]


def test_no_groups_needed_is_an_error():
    with pytest.raises(ValueError, match="got num_groups=0, max_rounds=10; need at least 1"):
        fill_groups(Prompts(LIVE), signal, num_groups=0)
