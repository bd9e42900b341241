import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import (
    group_metrics,
    group_relative,
    group_statistics,
    has_signal,
    kl_k1,
    population_std,
)
from rlkit.batch import Batch

# Without the shape checks that run only under pytest: the errors that a user sees.
plain_group_relative = inspect.unwrap(group_relative)
plain_group_statistics = inspect.unwrap(group_statistics)

eighths = st.integers(-16, 16).map(lambda n: n / 8)  # exact in float32, also after a shift
rows = st.lists(st.tuples(eighths, st.integers(0, 4)), min_size=1, max_size=20)


def tensors(rows):
    """rewards [B], group_ids [B] of (reward, group) pairs."""
    return torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])


def same(*values):
    """Rewards of one group."""
    rewards = torch.tensor(values)
    return rewards, torch.zeros(len(rewards), dtype=torch.int64)


def test_group_by_hand():
    rewards, ids = same(1.0, 2.0, 3.0, 6.0)  # mean 3, squared deviations 4 + 1 + 0 + 9 = 14
    std = (14 / 3) ** 0.5
    expected = [-2 / std, -1 / std, 0, 3 / std]
    assert group_relative(rewards, ids).tolist() == pytest.approx(expected, abs=1e-5)


def test_population_std_divides_by_n():
    rewards, ids = same(1.0, 2.0, 3.0, 6.0)
    expected = [x / 3.5**0.5 for x in (-2, -1, 0, 3)]
    got = group_relative(rewards, ids, std=population_std)
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


def test_no_std_leaves_the_deviations():
    rewards, ids = same(1.0, 2.0, 3.0, 6.0)
    assert group_relative(rewards, ids, std=None).tolist() == [-2, -1, 0, 3]


def test_spread_may_be_a_function_of_the_users():
    rewards, ids = same(0.0, 1.0)
    got = group_relative(rewards, ids, std=lambda squares, count: 0 * squares + 0.5, eps=0.0)
    assert got.tolist() == [-1, 1]


def test_group_of_one_has_zero_advantage():  # faults A1
    assert group_relative(*same(0.7)).tolist() == [0.0]


def test_group_of_one_is_counted():  # faults A1
    metrics = group_metrics(torch.tensor([0.7, 1, 0]), torch.tensor([0, 1, 1]))
    assert metrics["group/num_single"].item() == 1


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
@pytest.mark.parametrize(
    ("value", "num", "dtype"),
    [
        (0.2, 8, torch.float32),
        (0.3, 6, torch.float32),
        (0.9, 3, torch.float32),
        (0.1, 3, torch.float64),
    ],
)
def test_constant_group_has_zero_advantage(value, num, dtype, eps):  # faults A2
    rewards = torch.full((num,), value, dtype=dtype)
    ids = torch.zeros(num, dtype=torch.int64)
    assert group_relative(rewards, ids, eps=eps).tolist() == [0.0] * num
    assert not has_signal(rewards, ids).any()


def test_rounding_residue_is_no_signal():  # faults A2
    rewards, ids = same(0.3, 0.3 + 3e-8, 0.1 + 0.2)
    assert group_relative(rewards, ids).tolist() == [0.0] * 3


def test_seven_failed_rewards_leave_a_group_without_signal():  # faults A4
    got = group_relative(*same(*[torch.nan] * 7, 1.0))
    assert got.tolist() == [0.0] * 8


def test_failed_reward_leaves_its_group():  # faults A4
    got = group_relative(*same(torch.nan, 1.0, 0.0, torch.inf))
    assert got.tolist() == [0, *group_relative(*same(1.0, 0.0)).tolist(), 0]


def test_failed_reward_does_not_touch_other_groups():  # faults A4
    got = group_relative(torch.tensor([torch.nan, 1.0, 0.0]), torch.tensor([0, 1, 1]))
    assert got.tolist() == [0, *group_relative(*same(1.0, 0.0)).tolist()]


def test_failed_rewards_are_counted():  # faults A4
    metrics = group_metrics(*same(*[torch.nan] * 7, 1.0))
    assert metrics["group/num_failed_rewards"].item() == 7
    assert metrics["group/signal_fraction"].item() == 0


def test_mean_of_a_group_skips_failed_rewards():  # faults A4
    groups = group_statistics(*same(*[torch.nan] * 7, 1.0))
    assert groups.mean.tolist() == [1.0]
    assert groups.count.tolist() == [1]


def test_groups_go_by_id_not_by_position():  # faults A6
    got = group_relative(torch.tensor([1.0, 1, 0, 0]), torch.tensor([0, 1, 0, 1]))
    assert got.sign().tolist() == [1, 1, -1, -1]


def test_groups_may_differ_in_size():
    got = group_relative(torch.tensor([1.0, 0, 1, 0, 0.5]), torch.tensor([9, 9, 4, 4, 4]), std=None)
    assert got.tolist() == [0.5, -0.5, 0.5, -0.5, 0]


@settings(deadline=None)
@given(rows)
def test_advantages_of_a_group_sum_to_zero(rows):
    rewards, ids = tensors(rows)
    advantages = group_relative(rewards.double(), ids)
    for group in ids.unique():
        assert advantages[ids == group].sum().abs().item() < 1e-9


@settings(deadline=None)
@given(rows, eighths)
def test_adding_a_constant_changes_no_advantage(rows, shift):
    rewards, ids = tensors(rows)
    shifted = group_relative(rewards.double() + shift, ids)
    assert torch.allclose(shifted, group_relative(rewards.double(), ids), atol=1e-9)


@settings(deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_order_of_rows_does_not_matter(rows, random):
    rewards, ids = tensors(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = group_relative(rewards[order].double(), ids[order])
    assert torch.allclose(shuffled, group_relative(rewards.double(), ids)[order], atol=1e-9)


@settings(deadline=None)
@given(st.floats(-1e3, 1e3, width=32), st.integers(1, 9))
def test_constant_group_has_exactly_zero_advantage_whatever_the_reward(value, num):
    rewards = torch.full((num,), value)
    assert group_relative(rewards, torch.zeros(num, dtype=torch.int64)).tolist() == [0.0] * num


@settings(deadline=None)
@given(rows)
def test_advantages_are_never_nan_and_signal_says_where_they_are_zero(rows):
    rewards, ids = tensors(rows)
    advantages = group_relative(rewards, ids)
    assert advantages.isfinite().all()
    assert (advantages[~has_signal(rewards, ids)] == 0).all()


@settings(deadline=None)
@given(rows)
def test_statistics_equal_a_loop_over_groups(rows):
    rewards, ids = tensors(rows)
    groups = group_statistics(rewards, ids)
    for i, group in enumerate(ids.unique()):
        mine = rewards[ids == group].double()
        assert groups.count[i] == len(mine)
        assert groups.mean[i].item() == pytest.approx(mine.mean().item(), abs=1e-12)
        assert groups.span[i].item() == (mine.max() - mine.min()).item()
        assert (groups.index[ids == group] == i).all()


def test_integer_and_bool_rewards_give_float32():
    ids = torch.tensor([0, 0])
    for rewards in (torch.tensor([1, 0]), torch.tensor([True, False])):
        got = group_relative(rewards, ids)
        assert got.dtype == torch.float32
        assert got.tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_float_rewards_keep_their_dtype(dtype):
    rewards = torch.tensor([1, 0], dtype=dtype)
    assert group_relative(rewards, torch.tensor([0, 0])).dtype == dtype


def test_no_rows_give_no_advantages():
    empty = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert group_relative(*empty).shape == (0,)
    assert group_metrics(*empty)["group/signal_fraction"].item() == 0


def test_group_ids_of_another_length_are_an_error():
    with pytest.raises(
        ValueError, match=r"group_ids: got shape \(3,\), need \[4\], one id a reward"
    ):
        plain_group_statistics(torch.zeros(4), torch.zeros(3, dtype=torch.int64))


def test_rewards_a_token_are_an_error():
    with pytest.raises(ValueError, match=r"rewards: got shape \(2, 3\), need \[B\]"):
        plain_group_statistics(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


def test_float_group_ids_are_an_error():
    with pytest.raises(TypeError, match=r"group_ids: got torch.float32, need a tensor of integers"):
        plain_group_statistics(torch.zeros(2), torch.zeros(2))


def test_list_of_rewards_is_an_error():
    with pytest.raises(TypeError, match="rewards: got list, need a tensor"):
        plain_group_statistics([1.0, 0.0], torch.zeros(2, dtype=torch.int64))


def test_shape_errors_reach_the_caller_of_an_estimator():
    with pytest.raises((ValueError, TypeError), match="group_ids"):
        plain_group_relative(torch.zeros(4), torch.zeros(3, dtype=torch.int64))


def test_group_without_signal_stays_in_loss_and_denominator_or_leaves_both():  # faults A9
    batch = Batch.from_columns(
        {
            "group_ids": [0, 0, 1, 1],
            "rewards": torch.tensor([1.0, 1, 1, 0]),
            "response_mask": torch.ones(4, 1),
            "logprobs": torch.full((4, 1), -1.0),
            "ref_logprobs": torch.full((4, 1), -1.1),
        }
    )

    def penalty(batch):
        kl = kl_k1(batch["logprobs"], batch["ref_logprobs"])  # 0.1 a token
        return batch.token_mean(kl).item(), batch.step_tokens

    kept = batch.as_step()
    masked = batch.select(has_signal(batch["rewards"], batch["group_ids"])).as_step()
    assert penalty(kept) == (pytest.approx(0.1), 4)
    assert penalty(masked) == (pytest.approx(0.1), 2)
    assert masked["group_ids"].tolist() == [1, 1]


def test_filter_on_accuracy_drops_a_group_that_shaping_gave_spread():  # faults A11
    accuracy, ids = same(0.0, 0.0, 0.0, 0.0)
    shaped = accuracy + torch.tensor([-0.1, -0.2, -0.3, -0.4])
    assert not has_signal(accuracy, ids).any()
    phantom = group_relative(shaped, ids)
    assert phantom.tolist() == pytest.approx([1.162, 0.387, -0.387, -1.162], abs=1e-3)
