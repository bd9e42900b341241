import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import gradient, of_ratios

from rlkit.algo import cispo_loss, sapo_loss


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_cispo_keeps_the_gradient_of_clipped_tokens():  # faults B9
    logprobs, batch = of_ratios([[2.0]], [[1.0]])
    loss, metrics = cispo_loss(logprobs, batch, clip_high=0.2)
    assert gradient(loss, logprobs).item() == pytest.approx(-1.2)
    assert metrics["policy/clip_fraction"].item() == 1


def test_cispo_value_is_minus_weight_times_advantage_times_logprob():
    logprobs, batch = of_ratios([[2.0, 0.5]], [[1.0, -2.0]])
    loss, _ = cispo_loss(logprobs, batch)
    now = [-1 + math.log(2), -1 + math.log(0.5)]
    assert loss.item() == pytest.approx((-1.2 * now[0] + 2 * 0.5 * now[1]) / 2)


def test_cispo_has_no_lower_bound_unless_asked():
    logprobs, batch = of_ratios([[0.1]], [[1.0]])
    assert gradient(cispo_loss(logprobs, batch)[0], logprobs).item() == pytest.approx(-0.1)
    bounded, _ = cispo_loss(logprobs, batch, clip_low=0.2)
    assert gradient(bounded, logprobs).item() == pytest.approx(-0.8)


@given(st.floats(0.05, 20), st.floats(-3, 3), st.floats(0, 4))
def test_cispo_gradient_is_the_capped_weight_times_the_advantage(ratio, advantage, clip_high):
    logprobs, batch = of_ratios([[ratio]], [[advantage]])
    loss, _ = cispo_loss(logprobs, batch, clip_high=clip_high)
    expected = -min(ratio, 1 + clip_high) * advantage
    assert gradient(loss, logprobs).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_sapo_on_policy_has_gate_one():
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    loss, metrics = sapo_loss(logprobs, batch)
    assert loss.item() == pytest.approx(-2)  # 4 / tau * sigmoid(0)
    assert gradient(loss, logprobs).item() == pytest.approx(-1)
    assert metrics["policy/gate_mean"].item() == 1


@pytest.mark.parametrize(("advantage", "tau"), [(1.0, 1.0), (-1.0, 1.05)])
def test_sapo_gates_by_the_sign_of_the_advantage(advantage, tau):
    logprobs, batch = of_ratios([[3.0]], [[advantage]])
    loss, metrics = sapo_loss(logprobs, batch)
    p = sigmoid(tau * 2)
    assert loss.item() == pytest.approx(-4 / tau * p * advantage)
    assert gradient(loss, logprobs).item() == pytest.approx(-3 * 4 * p * (1 - p) * advantage)
    assert metrics["policy/gate_mean"].item() == pytest.approx(4 * p * (1 - p))


@given(st.floats(0.05, 20), st.sampled_from([-1.0, 1.0]), st.floats(0.2, 4))
def test_sapo_gradient_is_never_cut_and_never_larger_than_the_plain_one(ratio, advantage, tau):
    logprobs, batch = of_ratios([[ratio]], [[advantage]])
    logprobs = logprobs.detach().double().requires_grad_()  # 1 - sigmoid(76) is 0 in float32
    loss, _ = sapo_loss(logprobs, batch, tau_positive=tau, tau_negative=tau)
    slope = gradient(loss, logprobs).item()
    assert slope * advantage <= 0
    assert abs(slope) <= ratio * 1.00001
    if tau * ratio < 20:
        assert slope != 0


def test_sapo_needs_temperatures_above_zero():
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match=r"tau_positive, tau_negative: got 0, 1.05; need both"):
        sapo_loss(logprobs, batch, tau_positive=0)


def test_negative_advantages_are_gated_more_by_default():
    logprobs, batch = of_ratios([[3.0], [3.0]], [[1.0], [-1.0]])
    up, down = gradient(sapo_loss(logprobs, batch)[0], logprobs).abs().flatten()
    assert down < up
    assert torch.isfinite(down)
