import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient

ESTIMATORS = (kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient)
POLICY, REFERENCE = [0.3, -0.2, 0.1], [0.0, 0.5, -0.5]
logits = st.lists(st.floats(-3, 3), min_size=5, max_size=5)


def exact(logits, ref_logits):
    """KL(policy || reference) over the whole vocabulary, and its gradient in the logits."""
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs, ref = x.log_softmax(0), torch.tensor(ref_logits, dtype=torch.float64).log_softmax(0)
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    return kl.item(), torch.autograd.grad(kl, x)[0].tolist()


def expected(estimator, logits, ref_logits, *, weigh=False):
    """Expectation of an estimator and of its gradient over tokens that the policy samples."""
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs = x.log_softmax(0)[None]  # [1, V]: every token once, weighted by its probability
    ref = torch.tensor(ref_logits, dtype=torch.float64).log_softmax(0)[None]
    values = estimator(logprobs, ref)
    if weigh:
        values = values * (logprobs - logprobs.detach()).exp()
    mean = (logprobs.detach().exp() * values).sum()
    return mean.item(), torch.autograd.grad(mean, x)[0].tolist()


def test_gradient_of_the_true_kl():  # faults B7
    assert exact(POLICY, REFERENCE)[1] == pytest.approx([0.0614, -0.2129, 0.1515], abs=5e-5)


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3, kl_k3_with_k2_gradient])
def test_mean_is_the_kl(estimator):  # faults B7
    kl, _ = exact(POLICY, REFERENCE)
    assert expected(estimator, POLICY, REFERENCE)[0] == pytest.approx(kl, abs=1e-12)


def test_k1_as_a_loss_has_no_gradient():  # faults B7
    assert expected(kl_k1, POLICY, REFERENCE)[1] == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("estimator", [kl_k2, kl_k3_with_k2_gradient])
def test_k2_has_the_gradient_of_the_kl(estimator):  # faults B7
    _, gradient = exact(POLICY, REFERENCE)
    assert expected(estimator, POLICY, REFERENCE)[1] == pytest.approx(gradient, abs=1e-12)


def test_k3_as_a_loss_has_the_gradient_of_the_reverse_kl():  # faults B7
    got = expected(kl_k3, POLICY, REFERENCE)[1]
    assert got == pytest.approx([0.1051, -0.2564, 0.1513], abs=1e-4)
    p, q = (torch.tensor(x, dtype=torch.float64).softmax(0) for x in (POLICY, REFERENCE))
    assert got == pytest.approx((p - q).tolist(), abs=1e-12)  # of KL(reference || policy)


def test_k3_weighted_by_the_ratio_has_the_gradient_of_the_kl():  # faults B7
    _, gradient = exact(POLICY, REFERENCE)
    got = expected(kl_k3, POLICY, REFERENCE, weigh=True)[1]
    assert got == pytest.approx(gradient, abs=1e-12)


@settings(deadline=None)
@given(logits, logits)
def test_mean_of_k1_and_k3_is_the_kl_of_any_categorical(policy, reference):
    kl, _ = exact(policy, reference)
    assert expected(kl_k1, policy, reference)[0] == pytest.approx(kl, abs=1e-9)
    assert expected(kl_k3, policy, reference)[0] == pytest.approx(kl, abs=1e-9)


@settings(deadline=None)
@given(logits, logits)
def test_gradient_of_k2_is_that_of_the_kl_of_any_categorical(policy, reference):
    _, gradient = exact(policy, reference)
    for estimator in (kl_k2, kl_k3_with_k2_gradient):
        got = expected(estimator, policy, reference)[1]
        assert got == pytest.approx(gradient, abs=1e-9)


@settings(deadline=None)
@given(st.floats(-80, 80, width=32))
def test_k3_is_never_negative(difference):
    assert kl_k3(torch.tensor([[difference]]), torch.zeros(1, 1)).item() >= 0


def test_k3_of_nearly_equal_logprobs_is_never_negative():
    difference = torch.cat([torch.logspace(-9, 0, 20_001), -torch.logspace(-9, 0, 20_001)])[None]
    assert (kl_k3(difference, torch.zeros_like(difference)) >= 0).all()


def test_k2_is_never_negative_and_k1_has_the_sign_of_the_log_ratio():
    logprobs, ref = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]])
    assert kl_k1(logprobs, ref).tolist() == [[1, -1]]
    assert kl_k2(logprobs, ref).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [(-3.0, 16.09, -19.09), (-2.5, 8.68, 1 - math.exp(2.5))],
)
def test_k3_far_off_still_pulls_back(difference, value, gradient):  # faults B6
    logprobs = torch.tensor([[difference]], requires_grad=True)
    kl = kl_k3(logprobs, torch.zeros(1, 1))
    kl.sum().backward()
    assert kl.item() == pytest.approx(value, abs=5e-3)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=5e-3)


def test_straight_through_has_exactly_the_value_of_k3():
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = torch.randn(2, 8, 9, generator=generator)
    assert torch.equal(kl_k3_with_k2_gradient(logprobs, ref), kl_k3(logprobs, ref))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_policies_have_zero_kl(estimator):
    logprobs = torch.tensor([[-0.3, -7.0]])
    assert estimator(logprobs, logprobs).tolist() == [[0, 0]]


KL = AdaptiveKL(target=0.1, horizon=1000, coef=0.05)


def test_the_coefficient_rises_while_the_kl_is_ten_times_its_target():  # faults F7
    used, kl = [], KL
    for _ in range(4):
        used.append(kl.coef)
        kl = kl.after(10 * kl.target, num=256)
    assert used == pytest.approx([0.05 * 1.0512**step for step in range(4)])
    assert used[3] > used[0]


@pytest.mark.parametrize(("kl", "factor"), [(0.11, 1.02), (0.1, 1), (0.095, 0.99), (0, 0.96)])
def test_the_coefficient_follows_the_relative_error_up_to_a_fifth(kl, factor):
    assert KL.after(kl, num=200).coef == pytest.approx(0.05 * factor)


@given(st.floats(-10, 1e6), st.integers(0, 10**9))
def test_the_coefficient_stays_above_0_and_moves_by_at_most_a_fifth(kl, num):
    assert 0.8 - 1e-9 <= KL.after(kl, num).coef / KL.coef <= 1.2 + 1e-9


def test_the_object_itself_does_not_change():
    KL.after(5.0, num=256)
    assert KL.coef == 0.05


@pytest.mark.parametrize("name", ["target", "horizon", "coef"])
def test_numbers_that_are_not_above_0_are_errors(name):
    with pytest.raises(ValueError, match=f"{name}: got 0, need more than 0"):
        AdaptiveKL(**{"target": 0.1, "horizon": 1000, "coef": 0.05} | {name: 0})
