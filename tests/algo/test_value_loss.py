import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algo import clipped_value_loss
from rlkit.batch import Batch
from rlkit.glossary import GLOSSARY

numbers = st.floats(-4, 4, width=32)


def of_values(old, returns, now):
    """The critic's values now, and the batch, of rows of one token each."""
    column = {"values": torch.tensor(old)[:, None], "returns": torch.tensor(returns)[:, None]}
    batch = Batch.from_columns({"response_mask": torch.ones(len(old), 1), **column})
    return torch.tensor(now)[:, None].requires_grad_(), batch


def test_one_token_a_row_is_not_broadcast():  # faults B13
    values, batch = of_values([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert clipped_value_loss(values, batch)[0].item() == 0


def test_squeezed_values_are_an_error():  # faults B13
    values, batch = of_values([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    batch["returns"] = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"returns: got shape \(3,\), need \(3, 1\)"):
        clipped_value_loss(values, batch)


@pytest.mark.parametrize(
    ("target", "loss", "slope", "held"),
    [(2.0, 1.62, 0, 1), (-1.0, 2.0, 2, 0)],  # towards the return: (0.2 - 2)² / 2; away from it
)
def test_value_is_clipped_only_on_its_way_to_the_return(target, loss, slope, held):
    values, batch = of_values([0.0], [target], [1.0])
    got, metrics = clipped_value_loss(values, batch, clip=0.2)
    assert got.item() == pytest.approx(loss)
    assert torch.autograd.grad(got, values)[0].item() == pytest.approx(slope)
    assert metrics["critic/clip_fraction"].item() == held


def test_no_clip_is_half_the_squared_error():
    values, batch = of_values([0.0, 0.0], [2.0, 0.0], [1.0, 3.0])
    assert clipped_value_loss(values, batch, clip=None)[0].item() == pytest.approx((1 + 9) / 4)


def test_metrics_are_in_the_glossary():
    values, batch = of_values([0.0], [2.0], [1.0])
    _, metrics = clipped_value_loss(values, batch)
    assert metrics.keys() <= GLOSSARY.keys()
    assert metrics["critic/value_mean"].item() == 1
    assert metrics["critic/return_mean"].item() == 2


def test_clip_must_be_above_zero():
    values, batch = of_values([0.0], [2.0], [1.0])
    with pytest.raises(ValueError, match="clip: got 0, need more than 0"):
        clipped_value_loss(values, batch, clip=0)


@given(numbers, numbers, numbers, st.floats(0.01, 2))
def test_clip_only_raises_the_loss_and_a_held_value_has_no_gradient(old, target, now, clip):
    values, batch = of_values([old], [target], [now])
    plain, _ = clipped_value_loss(values, batch, clip=None)
    clipped, metrics = clipped_value_loss(values, batch, clip=clip)
    assert clipped.item() >= plain.item()
    if metrics["critic/clip_fraction"].item():
        assert torch.autograd.grad(clipped, values)[0].item() == 0
