"""Advantages beside GRPO's: Dr. GRPO, RLOO, REINFORCE++."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import dr_grpo, group_relative, reinforce_pp, rloo

eighths = st.integers(-16, 16).map(lambda n: n / 8)  # exact in float32
rows = st.lists(st.tuples(eighths, st.integers(0, 4)), min_size=1, max_size=20)
ESTIMATORS = (group_relative, dr_grpo, rloo, reinforce_pp)


def tensors(rows):
    return torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])


def test_dr_grpo_subtracts_the_mean_of_the_group():
    got = dr_grpo(torch.tensor([1.0, 2, 6, 5]), torch.tensor([7, 7, 7, 3]))
    assert got.tolist() == [-2, -1, 3, 0]


def test_rloo_subtracts_the_mean_of_the_others():
    got = rloo(torch.tensor([1.0, 2, 6, 5]), torch.tensor([7, 7, 7, 3]))
    assert got.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 0]


def test_reinforce_pp_whitens_over_the_batch():
    got = reinforce_pp(torch.tensor([1.0, 3, 5, 7]))  # mean 4, squares 9 + 1 + 1 + 9, std 5 ** 0.5
    assert got.tolist() == pytest.approx([-1.3416, -0.4472, 0.4472, 1.3416], abs=1e-4)


def test_reinforce_pp_with_group_baseline_has_one_std_for_all_groups():
    rewards, ids = torch.tensor([0.0, 1, 5, 9]), torch.tensor([0, 0, 1, 1])
    std = ((0.25 + 0.25 + 4 + 4) / 4) ** 0.5
    expected = [-0.5 / std, 0.5 / std, -2 / std, 2 / std]
    assert reinforce_pp(rewards, ids).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_of_a_group_give_exact_zeros(estimator):  # faults A2
    rewards = torch.tensor([*[0.2] * 8, 0.0, 1.0])
    got = estimator(rewards, torch.tensor([*[0] * 8, 1, 1]))
    assert got[:8].tolist() == [0.0] * 8
    assert (got[8:] != 0).all()


def test_equal_rewards_of_a_batch_give_exact_zeros_without_groups():  # faults A2
    assert reinforce_pp(torch.full((8,), 0.2)).tolist() == [0.0] * 8


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_of_one_has_zero_advantage(estimator):  # faults A1
    assert estimator(torch.tensor([0.7]), torch.tensor([5])).tolist() == [0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_failed_reward_gets_zero_and_leaves_the_others_alone(estimator):  # faults A4
    ids = torch.tensor([0, 0, 0, 1, 1])
    got = estimator(torch.tensor([1.0, torch.nan, 0.0, 1.0, 0.0]), ids)
    without = estimator(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    assert got[1].item() == 0
    assert torch.equal(got[[0, 2, 3, 4]], without)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_go_by_id_not_by_position(estimator):  # faults A6
    got = estimator(torch.tensor([1.0, 1, 0, 0]), torch.tensor([0, 1, 0, 1]))
    assert got.sign().tolist() == [1, 1, -1, -1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_integer_rewards_give_float32(estimator):
    assert estimator(torch.tensor([1, 0]), torch.tensor([0, 0])).dtype == torch.float32


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(rows=rows)
def test_advantages_of_a_group_sum_to_zero_and_are_finite(estimator, rows):
    rewards, ids = tensors(rows)
    got = estimator(rewards.double(), ids)
    assert got.isfinite().all()
    for group in ids.unique():
        assert got[ids == group].sum().abs().item() < 1e-6


@given(rows)
def test_rloo_equals_a_loop_over_the_others(rows):
    rewards, ids = tensors(rows)
    got = rloo(rewards.double(), ids)
    for i in range(len(rows)):
        others = (ids == ids[i]) & (torch.arange(len(rows)) != i)
        expected = (rewards[i] - rewards[others].mean()).item() if others.any() else 0
        assert got[i].item() == pytest.approx(expected, abs=1e-5)


@given(rows)
def test_reinforce_pp_has_std_one_if_anything_differs(rows):
    rewards, ids = tensors(rows)
    for got in (reinforce_pp(rewards.double()), reinforce_pp(rewards.double(), ids)):
        std = got.square().mean().sqrt().item()
        assert std == pytest.approx(1, abs=1e-6) or (got == 0).all()
