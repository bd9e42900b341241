from functools import partial

import pytest
import torch
from hypothesis import given
from loss_batches import gradient, steps, summed

from rlkit.algo import (
    clipped_policy_loss,
    decoupled_policy_loss,
    masked_importance_weight,
    truncated_importance_weight,
)
from rlkit.batch import Batch


def three_policies(behaviour, proximal, current, advantage):
    """Current logprobs and the batch of one token a row."""
    columns = {
        "rollout_logprobs": behaviour,
        "old_logprobs": proximal,
        "advantages": advantage,
    }
    columns = {name: torch.tensor(values)[:, None] for name, values in columns.items()}
    mask = torch.ones(len(behaviour), 1)
    batch = Batch.from_columns({"response_mask": mask, **columns})
    return torch.tensor(current)[:, None].requires_grad_(), batch


def test_clip_is_around_the_proximal_policy_and_the_weight_is_applied_by_default():
    now = torch.tensor(1.5).log().item() - 1.2  # u = 1.5, w = exp(-0.2) = 0.8187
    logprobs, batch = three_policies([-1.0, -1.0], [-1.2, -1.2], [now, now], [1.0, -1.0])
    loss, metrics = decoupled_policy_loss(logprobs, batch)
    assert loss.item() == pytest.approx(0.8187 * (-1.2 + 1.5) / 2, abs=1e-4)
    expected = [0, 0.8187 * 1.5 / 2]
    assert gradient(loss, logprobs).flatten().tolist() == pytest.approx(expected, abs=1e-4)
    assert metrics["policy/behaviour_weight_mean"].item() == pytest.approx(0.8187, abs=1e-4)
    assert metrics["policy/clip_fraction"].item() == 0.5
    assert metrics["policy/ratio_max"].item() == pytest.approx(1.5)  # current over proximal


@pytest.mark.parametrize(
    ("options", "weight"),
    [
        ({}, 7.389),
        ({"weight": partial(truncated_importance_weight, cap=5)}, 5),
        ({"weight": partial(masked_importance_weight, high=5)}, 0),
        ({"weight": lambda old, rollout, mask: torch.ones_like(old)}, 1),
    ],
)
def test_weight_may_be_uncapped_clamped_masked_or_a_function_of_the_users(options, weight):
    logprobs, batch = three_policies([-3.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, 1.0])
    loss, metrics = decoupled_policy_loss(logprobs, batch, **options)
    assert loss.item() == pytest.approx(-(weight + 1) / 2, abs=1e-3)  # two tokens in any case
    assert metrics["policy/behaviour_weight_max"].item() == pytest.approx(max(weight, 1), abs=1e-3)


@given(steps())
def test_without_staleness_it_is_the_clipped_loss(step):
    batch, table = step
    batch["rollout_logprobs"] = batch["old_logprobs"]
    (minibatch,) = batch.minibatches(1)
    loss, _, slope = summed([minibatch], table, decoupled_policy_loss, dual_clip=3.0)
    expected, _, expected_slope = summed([minibatch], table, clipped_policy_loss, dual_clip=3.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert torch.allclose(slope, expected_slope)


@given(steps())
def test_weight_in_the_advantages_is_the_weight_in_the_loss(step):
    batch, table = step
    (minibatch,) = batch.minibatches(1)
    loss, _, slope = summed([minibatch], table, decoupled_policy_loss, dual_clip=3.0)
    weight = (minibatch["old_logprobs"] - minibatch["rollout_logprobs"]).exp()
    minibatch["advantages"] = minibatch["advantages"] * weight
    expected, _, expected_slope = summed([minibatch], table, clipped_policy_loss, dual_clip=3.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    assert torch.allclose(slope, expected_slope)
