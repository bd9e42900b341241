import functools
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import (
    clipped_policy_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlkit.batch import Batch

AGGREGATES = (
    token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    functools.partial(seq_mean_token_sum, length=8),
)


def of_ratios(ratios, advantages, *, mask=None):
    """Logprobs [B, T] that ask for a gradient, and the batch, for given ratios and advantages."""
    ratios, advantages = torch.tensor(ratios), torch.tensor(advantages)
    old = torch.full_like(ratios, -1.0)
    batch = Batch.from_columns(
        {
            "response_mask": torch.ones_like(ratios) if mask is None else torch.tensor(mask),
            "old_logprobs": old,
            "advantages": advantages,
        }
    )
    return (old + ratios.log()).requires_grad_(), batch


def gradient(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


@st.composite
def steps(draw):
    """A batch of one to three groups of ragged rows, and a logprob for each of its tokens."""
    num_rows = draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = torch.randint(1, 6, (num_rows,), generator=generator).tolist()

    def column(dtype=torch.float64):
        return [torch.randn(n, generator=generator, dtype=dtype) for n in lengths]

    mask = [torch.rand(n, generator=generator) < 0.8 for n in lengths]
    groups = torch.randint(0, 3, (num_rows,), generator=generator).tolist()
    batch = Batch.from_columns(
        {
            "group_ids": groups,
            "response_ids": [torch.arange(n) for n in lengths],
            "response_mask": mask,
            "old_logprobs": column(),
            "advantages": column(),
        }
    )
    table = torch.randn(num_rows, max(lengths), generator=generator, dtype=torch.float64)
    return batch, table  # table[uid, t]: the logprob of that token


def summed(parts, table, **options):
    """Loss, metrics and gradient, added up over parts of a step."""
    table = table.clone().requires_grad_()
    totals, loss = {}, torch.zeros((), dtype=table.dtype)
    for part in parts:
        width = int(part.lengths("response_ids").max())
        share, metrics = clipped_policy_loss(table[part.uids, :width], part, **options)
        loss = loss + share
        for name, value in metrics.items():
            before = totals.get(name, torch.zeros(()))
            totals[name] = torch.maximum(before, value) if name.endswith("_max") else before + value
    return loss, totals, gradient(loss, table)


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


@settings(deadline=None)
@given(steps())
def test_ratio_one_gives_the_reinforce_gradient(step):
    batch, _ = step
    batch = batch.as_step()
    logprobs = batch["old_logprobs"].clone().requires_grad_()
    loss, _ = clipped_policy_loss(logprobs, batch)
    reinforce = -(batch["advantages"] * batch["response_mask"]) / max(batch.step_tokens, 1)
    assert torch.allclose(gradient(loss, logprobs), reinforce)


@settings(deadline=None)
@given(steps(), st.sampled_from(AGGREGATES), st.integers(1, 12), st.integers(1, 3))
def test_parts_of_a_step_sum_to_the_whole(step, aggregate, token_budget, ranks):  # faults B1
    batch, table = step
    options = {"aggregate": aggregate, "dual_clip": 3.0}
    for minibatch in batch.minibatches(1):
        parts = [
            micro
            for rank in range(ranks)
            for micro in minibatch.shard(rank, ranks).microbatches(token_budget)
        ]
        whole, metrics, expected = summed([minibatch], table, **options)
        loss, totals, got = summed(parts, table, **options)
        assert loss.item() == pytest.approx(whole.item(), abs=1e-12)
        assert torch.allclose(got, expected, atol=1e-12)
        for name, value in metrics.items():
            assert totals[name].item() == pytest.approx(value.item(), abs=1e-12), name


@settings(deadline=None)
@given(steps(), st.sampled_from(AGGREGATES))
def test_content_under_the_mask_changes_nothing(step, aggregate):
    batch, table = step
    batch = batch.as_step()
    mask = batch["response_mask"]
    loss, _, before = summed([batch], table, aggregate=aggregate)
    noise = torch.full_like(batch["advantages"], 1e4)
    batch["advantages"] = torch.where(mask, batch["advantages"], noise)
    batch["old_logprobs"] = torch.where(mask, batch["old_logprobs"], -noise)
    again, metrics, after = summed([batch], table, aggregate=aggregate)
    assert again.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(after, before, atol=1e-12)
    assert all(math.isfinite(x) for x in metrics.values())


def test_overflow_under_the_mask_gives_no_nan_gradient():
    logprobs, batch = of_ratios([[1.0, 1.0]], [[1.0, torch.nan]], mask=[[1, 0]])
    batch["old_logprobs"] = torch.tensor([[-1.0, -200.0]])
    loss, metrics = clipped_policy_loss(logprobs, batch)
    assert gradient(loss, logprobs).tolist() == [[-1, 0]]
    assert all(x.isfinite() for x in metrics.values())


def test_all_masked_batch_has_zero_loss_gradient_and_metrics():  # faults B3
    logprobs, batch = of_ratios([[1.5, 0.5]], [[1.0, 1.0]], mask=[[0, 0]])
    for aggregate in AGGREGATES:
        loss, metrics = clipped_policy_loss(logprobs, batch, aggregate=aggregate)
        assert loss.item() == 0
        assert gradient(loss, logprobs).tolist() == [[0, 0]]
        assert all(x.item() == 0 for x in metrics.values())


def test_batch_without_rows_has_zero_loss():
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    loss, metrics = clipped_policy_loss(logprobs[:0, :0], batch.select([]))
    assert loss.item() == 0
    assert metrics["policy/ratio_max"].item() == 0


def test_one_advantage_a_response_is_an_error_that_names_expand():
    logprobs, batch = of_ratios([[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    batch["advantages"] = torch.ones(2)  # [B] would broadcast over [B, T] where B = T
    with pytest.raises(ValueError, match=r"advantages: got shape \(2,\), need \(2, 2\).*expand"):
        clipped_policy_loss(logprobs, batch)


def test_old_logprobs_of_another_width_are_an_error():
    logprobs, batch = of_ratios([[1.0, 1.0]], [[1.0, 1.0]])
    batch["old_logprobs"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \(1, 1\), need \(1, 2\)"):
        clipped_policy_loss(logprobs, batch)


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


def test_loss_has_the_parameters_of_its_contract():
    assert list(inspect.signature(clipped_policy_loss).parameters)[:2] == ["logprobs", "batch"]
