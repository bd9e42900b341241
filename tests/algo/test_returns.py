import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import gae, kl_k1, kl_penalised_rewards, last_token, masked_sum, moments, whiten

seeds = st.integers(0, 2**31)
factors = st.floats(0, 1)


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


def some(seed, num_rows=3, width=6):
    """rewards, values, mask [B, T] of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, num_rows, width, generator=generator, dtype=torch.float64)
    return rewards, values, torch.rand(num_rows, width, generator=generator) < 0.6


def one_row(rewards, values, gamma, lam):
    """GAE of one row of trainable tokens alone, in Python floats."""
    advantages, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.insert(0, advantage)
    return advantages


def test_gae_by_hand():
    advantages, returns = gae(
        row(0, 0, 1), row(0.5, 0.25, 0.5), torch.ones(1, 3), gamma=0.5, lam=0.5
    )
    # deltas: 0.125 - 0.5, 0.25 - 0.25, 1 - 0.5
    assert advantages.tolist() == [[-0.375 + 0.25 * 0.125, 0.125, 0.5]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0]]


def test_gae_skips_tool_tokens():  # faults A15
    mask = row(1, 0, 0, 1)
    advantages, _ = gae(row(0, 0, 0, 1), row(0.5, 9, 9, 0.5), mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[0.25, 0, 0, 0.5]]


def test_gae_skips_padding_after_the_response():  # faults A15
    mask = row(1, 1, 0)
    advantages, _ = gae(row(0, 1, 0), row(0.5, 0.5, 9), mask, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[0.25, 0.5, 0]]


def test_kl_of_tool_tokens_is_not_in_the_return():  # faults A14
    mask = row(1, 0, 0, 1)
    rewards = kl_penalised_rewards(torch.zeros(1), torch.ones(1, 4), mask, coef=1.0)
    assert rewards.tolist() == [[-1, 0, 0, -1]]
    returns, _ = gae(rewards, torch.zeros(1, 4), mask, gamma=0.9, lam=1.0)
    assert returns[0, 0].item() == pytest.approx(-1.9)  # discounted by trainable tokens


def test_reward_with_kl_is_on_the_last_trainable_token():
    kl = kl_k1(row(-1, -1, -1), row(-2, -1, -1))
    got = kl_penalised_rewards(torch.tensor([5]), kl, row(1, 1, 0), coef=0.1)
    assert got[0].tolist() == pytest.approx([-0.1, 5, 0])


def test_last_trainable_token_of_ragged_rows():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    got = last_token(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert got.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 0]]


def test_one_reward_a_response_goes_on_its_last_token():
    values, mask = row(0.5, 0.5, 9), row(1, 1, 0)
    one = gae(torch.tensor([1.0]), values, mask, lam=0.5)
    each = gae(row(0, 1, 0), values, mask, lam=0.5)
    assert all(torch.equal(a, b) for a, b in zip(one, each, strict=True))


def test_row_with_a_failed_reward_teaches_nothing():  # faults A4
    rewards = torch.tensor([torch.nan, 1.0])
    values = torch.full((2, 2), 0.5)
    advantages, returns = gae(rewards, values, torch.ones(2, 2))
    assert advantages.tolist() == [[0, 0], [0.5, 0.5]]
    assert returns.tolist() == [[0.5, 0.5], [1, 1]]


def test_rewards_of_another_width_are_an_error():
    plain_gae = inspect.unwrap(gae)  # without the shape checks that run only under pytest
    with pytest.raises(ValueError, match=r"got shapes \(1, 2\), \(1, 3\); need \(1, 3\)"):
        plain_gae(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 3))


@pytest.mark.parametrize(
    ("rewards", "mask"),
    [((1,), (2, 2)), ((3,), (2, 2)), ((2,), (2,)), ((2,), (1, 2)), ((1, 2), (2, 2))],
)
def test_shapes_that_broadcasting_would_hide_are_an_error(rewards, mask):
    rewards, mask, values = torch.ones(rewards), torch.ones(mask), torch.zeros(2, 2)
    need = r"need \(2, 2\) as the values, rewards perhaps \[2\]"
    with pytest.raises(ValueError, match=need):
        inspect.unwrap(gae)(rewards, values, mask)


@pytest.mark.parametrize(("values", "mask"), [((1,), (2, 2)), ((2, 1), (2, 2)), ((2,), (2,))])
def test_last_tokens_take_one_value_a_row(values, mask):
    with pytest.raises(ValueError, match=r"values, response_mask: got .* need \[B\] and \[B, T\]"):
        inspect.unwrap(last_token)(torch.ones(values), torch.ones(mask))


@pytest.mark.parametrize("fn", [moments, whiten])
def test_a_mask_of_another_shape_is_an_error(fn):
    with pytest.raises(ValueError, match=r"x: got shape \(2, 2\), need \(1, 2\) as the mask"):
        inspect.unwrap(fn)(torch.zeros(2, 2), torch.ones(1, 2))


@given(seeds, st.floats(0, 1))
def test_token_rewards_add_up_to_the_reward_less_the_kl(seed, coef):
    rewards, kl, mask = some(seed)
    mask[:, 0] = True
    got = kl_penalised_rewards(rewards[:, 0], kl, mask, coef=coef)
    expected = rewards[:, 0] - coef * masked_sum(kl, mask)
    assert torch.allclose(got.sum(1), expected)
    assert (got[~mask] == 0).all()


@given(seeds)
def test_a_value_lands_on_one_token_if_any_is_trainable(seed):
    values, _, mask = some(seed)
    got = last_token(values[:, 0], mask)
    assert torch.equal(got.sum(1), torch.where(mask.any(1), values[:, 0], 0.0))
    assert (got[~mask] == 0).all()


@given(seeds, factors, factors)
def test_gae_equals_a_loop_over_trainable_tokens_alone(seed, gamma, lam):
    rewards, values, mask = some(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, on in enumerate(mask):
        expected = one_row(rewards[i][on].tolist(), values[i][on].tolist(), gamma, lam)
        assert advantages[i][on].tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(returns, torch.where(mask, advantages + values, 0.0))


@given(seeds)
def test_without_values_the_return_is_the_reward_to_go(seed):
    rewards, values, mask = some(seed)
    _, returns = gae(rewards, 0 * values, mask)
    to_go = torch.where(mask, rewards, 0.0).flip(1).cumsum(1).flip(1)
    assert torch.allclose(returns, torch.where(mask, to_go, 0.0))


@given(seeds, factors, factors)
def test_content_under_the_mask_changes_nothing(seed, gamma, lam):
    rewards, values, mask = some(seed)
    noise = torch.full_like(values, torch.nan)
    before = gae(rewards, values, mask, gamma=gamma, lam=lam)
    after = gae(
        torch.where(mask, rewards, noise),
        torch.where(mask, values, noise),
        mask,
        gamma=gamma,
        lam=lam,
    )
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_whitening_is_over_the_batch_not_the_shard():  # faults A12
    shards = row(1, 3), row(5, 7)
    mask = torch.ones(1, 2)
    total = sum(moments(shard, mask) for shard in shards)
    got = [whiten(shard, mask, total=total)[0].tolist() for shard in shards]
    assert got[0] + got[1] == pytest.approx([-1.342, -0.447, 0.447, 1.342], abs=1e-3)
    assert whiten(row(1, 3, 5, 7), torch.ones(1, 4))[0].tolist() == pytest.approx(got[0] + got[1])


def test_an_empty_shard_takes_part_in_whitening():  # faults A12
    full, empty = row(1, 3, 5, 7), torch.zeros(0, 4)
    total = moments(full, torch.ones(1, 4)) + moments(empty, torch.ones(0, 4))
    assert moments(empty, torch.ones(0, 4)).tolist() == [0, 0, 0]
    assert torch.equal(whiten(full, torch.ones(1, 4), total=total), whiten(full, torch.ones(1, 4)))
    assert whiten(empty, torch.ones(0, 4), total=total).shape == (0, 4)


@pytest.mark.parametrize("value", [0.0, 0.2, 1e3, -7.3])
def test_equal_values_whiten_to_exact_zeros(value):
    x = torch.full((2, 3), value)
    assert whiten(x, torch.ones(2, 3)).tolist() == [[0, 0, 0]] * 2


@given(seeds)
def test_whitened_values_have_mean_zero_and_std_one(seed):
    x, _, mask = some(seed)
    got = whiten(torch.where(mask, x, torch.nan), mask)
    assert (got[~mask] == 0).all()
    if mask.sum() > 1:
        assert masked_sum(got, mask).sum().item() == pytest.approx(0, abs=1e-6)
        assert got[mask].square().mean().item() == pytest.approx(1, abs=1e-5)


@given(seeds, st.integers(0, 3))
def test_whitening_by_shards_equals_whitening_the_batch(seed, cut):
    x, _, mask = some(seed)
    total = moments(x[:cut], mask[:cut]) + moments(x[cut:], mask[cut:])
    parts = [whiten(x[piece], mask[piece], total=total) for piece in (slice(cut), slice(cut, None))]
    assert torch.allclose(torch.cat(parts), whiten(x, mask), atol=1e-9)
