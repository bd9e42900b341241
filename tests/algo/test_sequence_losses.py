import math

import pytest
import torch
from hypothesis import given
from loss_batches import gradient, of_ratios, steps, summed

from rlkit.algo import clipped_policy_loss, gmpo_loss, gspo_loss, seq_mean_token_mean


def test_gspo_clips_the_geometric_mean_not_the_tokens():
    logprobs, batch = of_ratios([[2.0, 0.5]], [[1.0, 1.0]])  # geometric mean 1
    loss, metrics = gspo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(-1)
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([-0.5, -0.5])
    assert metrics["policy/clip_fraction"].item() == 0


@pytest.mark.parametrize(
    ("advantage", "value", "slope", "held"), [(1.0, -1.2, 0.0, 1), (-1.0, 2.0, 1.0, 0)]
)
def test_gspo_holds_back_whole_responses(advantage, value, slope, held):
    logprobs, batch = of_ratios([[4.0, 1.0]], [[advantage, advantage]])  # geometric mean 2
    loss, metrics = gspo_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(value)
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([slope, slope])
    assert metrics["policy/clip_fraction"].item() == held


def test_gspo_takes_advantages_a_token():
    logprobs, batch = of_ratios([[2.0, 0.5]], [[1.0, -3.0]])
    loss, _ = gspo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(1)
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([-0.5, 1.5])


def test_gspo_skips_masked_tokens_in_the_mean():
    logprobs, batch = of_ratios([[2.0, 9.0, 0.5]], [[1.0, 1.0, 1.0]], mask=[[1, 0, 1]])
    loss, _ = gspo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(-1)


def test_gmpo_clips_tokens_inside_the_geometric_mean():
    logprobs, batch = of_ratios([[math.e, 1.0]], [[1.0, 1.0]])  # log-ratios 1 -> 0.4, and 0
    loss, metrics = gmpo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(-math.exp(0.2))
    expected = [0, -math.exp(0.2) / 2]  # the clipped token loses its gradient, the other keeps it
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx(expected)
    assert metrics["policy/clip_fraction"].item() == 0.5


def test_gmpo_does_not_clip_the_side_that_pulls_back():
    logprobs, batch = of_ratios([[math.e, 1.0]], [[-1.0, -1.0]])
    loss, metrics = gmpo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(math.exp(0.5))
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([math.exp(0.5) / 2] * 2)
    assert metrics["policy/clip_fraction"].item() == 0


def test_gmpo_bounds_are_of_the_logarithm():
    logprobs, batch = of_ratios([[0.1]], [[-1.0]])
    loss, _ = gmpo_loss(logprobs, batch, clip_low=0.3)
    assert loss.item() == pytest.approx(math.exp(-0.3))
    with pytest.raises(ValueError, match=r"got -1, 0.4; need both >= 0"):
        gmpo_loss(logprobs, batch, clip_low=-1)


@given(steps())
def test_rows_of_one_token_make_gspo_the_clipped_loss(step):
    batch, table = step
    first = torch.zeros_like(batch["response_mask"])
    first[:, 0] = True
    batch["response_mask"] = first
    (minibatch,) = batch.minibatches(1)
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    one, _, slope = summed([minibatch], table, gspo_loss, **bounds)
    other, _, expected = summed(
        [minibatch], table, clipped_policy_loss, aggregate=seq_mean_token_mean, **bounds
    )
    assert one.item() == pytest.approx(other.item(), abs=1e-12)
    assert torch.allclose(slope, expected)


@given(steps())
def test_gmpo_without_bounds_has_one_gradient_for_all_tokens_of_a_response(step):
    batch, table = step
    (minibatch,) = batch.minibatches(1)
    _, metrics, slope = summed([minibatch], table, gmpo_loss, clip_low=1e9, clip_high=1e9)
    assert metrics["policy/clip_fraction"].item() == 0
    for uid, mask in zip(minibatch.uids, minibatch["response_mask"], strict=True):
        row = slope[uid, : len(mask)][mask]
        assert torch.allclose(row, row[:1].expand_as(row))
