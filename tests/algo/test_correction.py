import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import (
    importance_weight,
    interpolated_logprobs,
    masked_importance_weight,
    per_sequence,
    per_sequence_mean,
    truncated_importance_weight,
)

ONES = torch.ones(1, 2)
ratios = st.lists(st.floats(-5, 5), min_size=4, max_size=4)


def of_log_ratios(values, mask=None):
    """(old_logprobs, rollout_logprobs, response_mask) of one response."""
    old = torch.tensor([values])
    return (
        old,
        torch.zeros_like(old),
        torch.ones_like(old) if mask is None else torch.tensor([mask]),
    )


def test_weight_is_old_over_rollout_whatever_the_current_policy():  # faults B11
    got = truncated_importance_weight(torch.tensor([[-1.2]]), torch.tensor([[-1.0]]), ONES[:, :1])
    assert got.item() == pytest.approx(0.8187, abs=1e-4)


def test_truncated_weight_is_at_most_the_cap_and_has_no_gradient():
    old = torch.tensor([[3.0, -1.0]], requires_grad=True)
    got = truncated_importance_weight(old, torch.zeros(1, 2), ONES, cap=2.0)
    assert got[0].tolist() == pytest.approx([2, math.exp(-1)])
    assert not got.requires_grad


def test_masked_weight_is_zero_outside_its_bounds():
    got = masked_importance_weight(*of_log_ratios([1.0, 0.5, -3.0]), low=0.1, high=2.0)
    assert got[0].tolist() == pytest.approx([0, math.exp(0.5), 0])


def test_sequence_weight_is_the_product_of_trainable_tokens():
    got = importance_weight(*of_log_ratios([0.5, 9.0, 0.2], [1, 0, 1]), level=per_sequence)
    assert got[0].tolist() == pytest.approx([math.exp(0.7), 0, math.exp(0.7)])


def test_mean_sequence_weight_is_the_geometric_mean():
    got = importance_weight(*of_log_ratios([0.5, 9.0, 0.2], [1, 0, 1]), level=per_sequence_mean)
    assert got[0].tolist() == pytest.approx([math.exp(0.35), 0, math.exp(0.35)])


def test_a_sequence_is_masked_as_a_whole():
    triple = of_log_ratios([1.0, 0.1])
    got = masked_importance_weight(*triple, high=2.0, level=per_sequence)
    assert got.tolist() == [[0, 0]]


@pytest.mark.parametrize("level", [per_sequence, per_sequence_mean])
def test_an_overflowing_product_is_capped_or_masked_never_nan(level):
    triple = of_log_ratios([500.0, 500.0])
    assert truncated_importance_weight(*triple, level=level).tolist() == [[2, 2]]
    assert masked_importance_weight(*triple, level=level).tolist() == [[0, 0]]


def test_bounds_must_hold_the_weight_one():
    triple = of_log_ratios([0.0])
    with pytest.raises(ValueError, match=r"got 0.0 to 0.5, need 0 <= low <= 1 <= high"):
        truncated_importance_weight(*triple, cap=0.5)
    with pytest.raises(ValueError, match=r"got 1.5 to 2.0"):
        masked_importance_weight(*triple, low=1.5)


@given(ratios, st.floats(1, 10))
def test_truncated_and_masked_weights_agree_below_the_cap(values, cap):
    triple = of_log_ratios(values)
    plain = importance_weight(*triple)
    below = plain <= cap
    clamped = truncated_importance_weight(*triple, cap=cap)
    masked = masked_importance_weight(*triple, high=cap)
    assert torch.equal(clamped[below], plain[below])
    assert torch.equal(masked[below], plain[below])
    assert (masked[~below] == 0).all()
    assert (clamped <= cap * 1.00001).all()


def test_uncapped_sequence_weight_is_unbiased():
    behaviour = torch.tensor([0.6, 0.4], dtype=torch.float64)
    policy = torch.tensor([0.3, 0.7], dtype=torch.float64)
    mean = 0.0
    for tokens in torch.cartesian_prod(torch.arange(2), torch.arange(2)):  # 4 responses of 2
        weight = importance_weight(
            policy[tokens].log()[None], behaviour[tokens].log()[None], ONES, level=per_sequence
        )
        mean += (behaviour[tokens].prod() * weight[0, 0] * tokens.sum()).item()
    assert mean == pytest.approx(2 * 0.7)  # ones among two tokens of the policy


@given(st.floats(-2, 2), st.integers(1, 6))
def test_levels_of_equal_tokens_differ_by_the_length_alone(log_ratio, length):
    triple = of_log_ratios([log_ratio] * length)
    token = importance_weight(*triple)
    assert torch.allclose(importance_weight(*triple, level=per_sequence_mean), token)
    assert torch.allclose(importance_weight(*triple, level=per_sequence), token**length)


def test_interpolation_by_hand():
    """d = 0, 1: the rollout's; 2: half way; 4: three quarters of the way to the current policy."""
    rollout, now = torch.full((1, 4), -2.0), torch.full((1, 4), -1.0, requires_grad=True)
    got = interpolated_logprobs(now, rollout, staleness_steps=torch.tensor([[0, 1, 2, 4]]))
    assert got.tolist() == [[-2.0, -2.0, -1.5, -1.25]]
    assert not got.requires_grad


@given(ratios, ratios, st.integers(1, 50))
def test_interpolation_is_exact_where_logprobs_move_evenly(start, a_step, steps):
    """The policy before the current one, if each step moved a token's logprob by as much."""
    start, a_step = (torch.tensor([x], dtype=torch.float64) for x in (start, a_step))
    d = torch.full((1, 4), steps)
    got = interpolated_logprobs(start + steps * a_step, start, staleness_steps=d)
    assert torch.allclose(got, start + (steps - 1) * a_step)
