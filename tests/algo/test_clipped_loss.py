import pytest
import torch
from loss_batches import gradient, of_ratios

from rlkit.algo import clipped_policy_loss
from rlkit.batch import Batch


def test_value_inside_the_clip_is_minus_ratio_times_advantage():
    logprobs, batch = of_ratios([[1.1, 0.9]], [[2.0, -1.0]])
    loss, metrics = clipped_policy_loss(logprobs, batch)
    assert loss.item() == pytest.approx((-2.2 + 0.9) / 2)
    assert metrics["policy/clip_fraction"].item() == 0
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([-1.1, 0.45])


@pytest.mark.parametrize(
    ("ratio", "advantage", "value"),
    [(1.5, 1.0, -1.2), (0.5, -1.0, 0.8)],
)
def test_gradient_is_zero_on_the_clipped_side(ratio, advantage, value):
    logprobs, batch = of_ratios([[ratio]], [[advantage]])
    loss, metrics = clipped_policy_loss(logprobs, batch)
    assert loss.item() == pytest.approx(value)
    assert gradient(loss, logprobs).item() == 0
    assert metrics["policy/clip_fraction"].item() == 1


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, -1.0), (0.5, 1.0)])
def test_gradient_flows_on_the_side_that_pulls_back(ratio, advantage):
    logprobs, batch = of_ratios([[ratio]], [[advantage]])
    loss, metrics = clipped_policy_loss(logprobs, batch)
    assert gradient(loss, logprobs).item() == pytest.approx(-ratio * advantage)
    assert metrics["policy/clip_fraction"].item() == 0


def test_upper_and_lower_clip_are_apart():  # DAPO
    logprobs, batch = of_ratios([[1.25, 1.3, 0.75]], [[1.0, 1.0, -1.0]])
    loss, metrics = clipped_policy_loss(logprobs, batch, clip_low=0.3, clip_high=0.28)
    assert loss.item() == pytest.approx((-1.25 - 1.28 + 0.75) / 3)
    assert metrics["policy/clip_fraction"].item() == pytest.approx(1 / 3)


def test_dual_clip_bounds_tokens_of_negative_advantage():
    logprobs, batch = of_ratios([[10.0, 2.0, 10.0]], [[-1.0, -1.0, 1.0]])
    loss, metrics = clipped_policy_loss(logprobs, batch, dual_clip=3.0)
    assert loss.item() == pytest.approx((3 + 2 - 1.2) / 3)
    assert gradient(loss, logprobs)[0].tolist() == pytest.approx([0, 2 / 3, 0])
    assert metrics["policy/clip_fraction"].item() == pytest.approx(2 / 3)


def test_dual_clip_of_at_most_one_is_an_error():
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    with pytest.raises(ValueError, match=r"dual_clip: got 0.5, need more than 1"):
        clipped_policy_loss(logprobs, batch, dual_clip=0.5)


def test_loss_of_zero_still_has_a_gradient():  # faults B15
    logprobs, batch = of_ratios([[1.0, 1.0]], [[0.5, -0.5]])
    loss, _ = clipped_policy_loss(logprobs, batch)
    assert loss.item() == 0
    assert gradient(loss, logprobs)[0].tolist() == [-0.25, 0.25]


def test_gradient_of_one_token_on_policy():  # faults B15
    logprobs, batch = of_ratios([[1.0]], [[0.5]])
    loss, _ = clipped_policy_loss(logprobs, batch)
    assert gradient(loss, logprobs).item() == -0.5


def test_loss_in_the_metrics_keeps_its_sign():  # faults B14
    logprobs, batch = of_ratios([[1.0]], [[0.5]])
    assert clipped_policy_loss(logprobs, batch)[1]["policy/loss"].item() == -0.5


def test_metrics_are_detached_scalars_of_known_names():
    logprobs, batch = of_ratios([[1.1, 0.9]], [[2.0, -1.0]])
    _, metrics = clipped_policy_loss(logprobs, batch)
    assert sorted(metrics) == [
        "policy/clip_fraction",
        "policy/kl_old",
        "policy/loss",
        "policy/ratio_max",
        "policy/ratio_mean",
    ]
    assert all(x.ndim == 0 and not x.requires_grad for x in metrics.values())


def test_ratio_metrics_skip_masked_tokens():
    logprobs, batch = of_ratios([[1.1, 5.0, 0.9]], [[1.0, 1.0, 1.0]], mask=[[1, 0, 1]])
    _, metrics = clipped_policy_loss(logprobs, batch)
    assert metrics["policy/ratio_mean"].item() == pytest.approx(1.0)
    assert metrics["policy/ratio_max"].item() == pytest.approx(1.1)


def test_kl_old_is_the_kl_from_the_old_policy_in_expectation():
    old = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64).log_softmax(0)
    new = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    kls = []
    for token in range(3):  # each token the old policy may sample
        batch = Batch.from_columns(
            {
                "response_mask": torch.ones(1, 1),
                "old_logprobs": old[token].reshape(1, 1),
                "advantages": torch.ones(1, 1, dtype=torch.float64),
            }
        )
        _, metrics = clipped_policy_loss(new[token].reshape(1, 1), batch)
        kls.append(metrics["policy/kl_old"])
    exact = (old.exp() * (old - new)).sum().item()
    assert (old.exp() * torch.stack(kls)).sum().item() == pytest.approx(exact, abs=1e-12)


def test_loss_without_old_logprobs_names_the_stage_that_writes_them():
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    del batch["old_logprobs"]
    with pytest.raises(KeyError, match=r"actor\.compute_logprobs"):
        clipped_policy_loss(logprobs, batch)


def test_expanded_advantages_are_read_per_token():
    logprobs, batch = of_ratios([[1.0, 1.0], [1.0, 1.0]], [[0.0, 0.0]] * 2, mask=[[1, 1], [1, 0]])
    batch["advantages"] = batch.expand(torch.tensor([1.0, -2.0]))
    loss, _ = clipped_policy_loss(logprobs, batch)
    assert loss.item() == pytest.approx((-1 - 1 + 2) / 3)
