"""Numbers of verl 0.9.1 (trainer/ppo/core_algos.py, float64) on one fixed batch."""

from functools import partial

import pytest
import torch
from loss_batches import gradient

from rlkit.algo import (
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    gae,
    gmpo_loss,
    gspo_loss,
    sapo_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
)
from rlkit.batch import Batch

STEP = torch.arange(24, dtype=torch.float64).reshape(4, 6)
MASK = torch.tensor(
    [[1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]]
)
OLD = -1 - STEP.sin()
NOW = OLD + 0.5 * (3 * STEP).cos()
VALUES, RETURNS = (2 * STEP).sin(), (5 * STEP).cos()

dapo = partial(clipped_policy_loss, clip_high=0.28, dual_clip=3.0)


def frozen():
    advantages = torch.tensor([1.5, -0.5, -1.0, 2.0], dtype=torch.float64)[:, None] * MASK
    return Batch.from_columns(
        {
            "response_mask": MASK,
            "old_logprobs": OLD,
            "advantages": advantages,
            "values": VALUES,
            "returns": RETURNS,
        }
    )


@pytest.mark.parametrize(
    ("loss_fn", "value", "norm"),
    [
        (dapo, -0.095649809, 0.225327621),
        (partial(dapo, aggregate=seq_mean_token_mean), -0.274058028, 0.365309765),
        (partial(dapo, aggregate=seq_mean_token_sum), -0.334774333, 0.788646675),
        (partial(gspo_loss, clip_low=0.2, clip_high=0.28), -0.298396706, 0.388324547),
        (gmpo_loss, -0.290071468, 0.374912812),
        (partial(cispo_loss, clip_low=0.2, clip_high=0.28), -0.112694018, 0.322131558),
        (sapo_loss, -0.861332958, 0.390393219),
    ],
)
def test_policy_losses_and_their_gradients(loss_fn, value, norm):
    logprobs = NOW.clone().requires_grad_()
    loss, _ = loss_fn(logprobs, frozen())
    assert loss.item() == pytest.approx(value, abs=1e-9)
    assert gradient(loss, logprobs).norm().item() == pytest.approx(norm, abs=1e-9)


def test_value_loss_and_its_gradient():
    values = (VALUES + 0.5 * (7 * STEP).sin()).requires_grad_()
    loss, _ = clipped_value_loss(values, frozen())
    assert loss.item() == pytest.approx(0.68210253, abs=1e-8)
    assert gradient(loss, values).norm().item() == pytest.approx(0.285561515, abs=1e-9)


def test_gae():
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0])
    advantages, returns = gae(rewards, VALUES, MASK, gamma=0.9, lam=0.8)
    first = [0.451969, 0.40041, 0.0, 0.625979, 0.622076, 1.0]
    assert returns[0].tolist() == pytest.approx(first, abs=1e-6)
    assert returns.sum().item() == pytest.approx(5.712069595, abs=1e-8)
    assert advantages.norm().item() == pytest.approx(3.63490294, abs=1e-8)
