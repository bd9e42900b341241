import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import entropy_bonus, kl_k1, kl_k2, kl_k3, kl_k3_with_k2_gradient, kl_penalty
from rlkit.batch import Batch
from rlkit.glossary import GLOSSARY


def of_logprobs(now, ref, mask):
    batch = Batch.from_columns(
        {"ref_logprobs": torch.tensor([ref]), "response_mask": torch.tensor([mask])}
    )
    return torch.tensor([now], requires_grad=True), batch


@pytest.mark.parametrize(
    ("estimator", "value", "slopes"),  # of the tokens at distance 1 and 0
    [
        (kl_k1, 1.0, (1.0, 1.0)),
        (kl_k2, 0.5, (1.0, 0.0)),
        (kl_k3, 0.3679, (0.6321, 0.0)),  # exp(-1) - 1 + 1, 1 - exp(-1)
        (kl_k3_with_k2_gradient, 0.3679, (1.0, 0.0)),
    ],
)
def test_penalty_is_the_coefficient_times_the_estimate(estimator, value, slopes):
    logprobs, batch = of_logprobs([-1.0, -1.0, 7.0], [-2.0, -1.0, -99.0], [1, 1, 0])
    loss, metrics = kl_penalty(logprobs, batch, coef=0.1, estimator=estimator)
    assert loss.item() == pytest.approx(0.1 * value / 2, abs=1e-5)
    assert metrics["policy/kl_ref"].item() == pytest.approx(value / 2, abs=1e-4)
    got = torch.autograd.grad(loss, logprobs)[0]
    expected = [0.1 * slope / 2 for slope in slopes]
    assert got[0].tolist() == pytest.approx([*expected, 0], abs=1e-5)


def test_default_estimator_has_the_gradient_of_k2():
    logprobs, batch = of_logprobs([-1.0], [-4.0], [1])
    loss, _ = kl_penalty(logprobs, batch, coef=1.0)
    assert torch.autograd.grad(loss, logprobs)[0].item() == 3


@given(st.floats(-60, 60))
def test_no_distance_from_the_reference_kills_the_gradient(distance):  # faults B6
    logprobs, batch = of_logprobs([distance], [0.0], [1])
    for estimator in (kl_k2, kl_k3, kl_k3_with_k2_gradient):
        loss, _ = kl_penalty(logprobs, batch, coef=1.0, estimator=estimator)
        slope = torch.autograd.grad(loss, logprobs)[0].item()
        assert slope * distance > 0 or abs(distance) < 1e-6


def test_entropy_bonus_raises_the_entropy():
    entropy = torch.tensor([[0.5, 1.5, 9.0]], requires_grad=True)
    batch = Batch.from_columns({"response_mask": torch.tensor([[1, 1, 0]])})
    loss, metrics = entropy_bonus(entropy, batch, coef=0.01)
    assert loss.item() == pytest.approx(-0.01)
    assert torch.autograd.grad(loss, entropy)[0][0].tolist() == pytest.approx([-0.005, -0.005, 0])
    assert metrics["policy/entropy"].item() == 1
    assert metrics.keys() <= GLOSSARY.keys()
