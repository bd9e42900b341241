"""What holds of every loss; what only one does is in the file of its name."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import AGGREGATES, LOSSES, POLICY_LOSSES, gradient, of_ratios, steps, summed

from rlkit.algo import token_mean
from rlkit.glossary import GLOSSARY

COLUMNS = ("advantages", "old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns")

every_loss = pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=list(LOSSES))
every_policy_loss = pytest.mark.parametrize(
    "loss_fn", POLICY_LOSSES.values(), ids=list(POLICY_LOSSES)
)


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("far", [-200.0, 100.0])
def test_a_token_far_from_the_old_policy_gives_no_nan(loss_fn, advantage, far):
    logprobs, batch = of_ratios([[1.0, 1.0]], [[advantage, advantage]])
    for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "values", "returns"):
        batch[name] = torch.full((1, 2), far)
    loss, _ = loss_fn(logprobs, batch)
    assert loss.isfinite()
    assert gradient(loss, logprobs).isfinite().all()


@every_loss
@settings(max_examples=30)
@given(steps(), st.sampled_from(AGGREGATES), st.integers(1, 12), st.integers(1, 3))
def test_parts_of_a_step_sum_to_the_whole(  # faults B1
    loss_fn, step, aggregate, token_budget, ranks
):
    batch, table = step
    options = {"loss_fn": loss_fn, "aggregate": aggregate}
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


@every_loss
@settings(max_examples=30)
@given(steps(), st.sampled_from(AGGREGATES), st.sampled_from([1e4, math.nan]))
def test_content_under_the_mask_changes_nothing(loss_fn, step, aggregate, content):
    batch, table = step
    batch = batch.as_step()
    mask = batch["response_mask"]
    loss, _, before = summed([batch], table, loss_fn=loss_fn, aggregate=aggregate)
    for name in COLUMNS:
        batch[name] = torch.where(mask, batch[name], torch.full_like(batch[name], -content))
    again, metrics, after = summed([batch], table, loss_fn=loss_fn, aggregate=aggregate)
    assert again.item() == pytest.approx(loss.item(), abs=1e-12)
    assert torch.allclose(after, before, atol=1e-12)
    assert all(math.isfinite(x) for x in metrics.values())


@every_policy_loss
@settings(max_examples=30)
@given(steps())
def test_ratio_one_gives_the_reinforce_gradient(loss_fn, step):
    batch, _ = step
    batch = batch.as_step()
    batch["advantages"] = batch.expand(torch.randn(len(batch), dtype=torch.float64))
    batch["rollout_logprobs"] = batch["old_logprobs"]
    logprobs = batch["old_logprobs"].clone().requires_grad_()
    loss, _ = loss_fn(logprobs, batch, aggregate=token_mean)
    reinforce = -(batch["advantages"] * batch["response_mask"]) / max(batch.step_tokens, 1)
    assert torch.allclose(gradient(loss, logprobs), reinforce)


@every_policy_loss
def test_all_masked_batch_has_zero_loss_gradient_and_metrics(loss_fn):  # faults B3
    logprobs, batch = of_ratios([[1.5, 0.5]], [[1.0, 1.0]], mask=[[0, 0]])
    for aggregate in AGGREGATES:
        loss, metrics = loss_fn(logprobs, batch, aggregate=aggregate)
        assert loss.item() == 0
        assert gradient(loss, logprobs).tolist() == [[0, 0]]
        assert all(x.item() == 0 for x in metrics.values())


@every_policy_loss
def test_batch_without_rows_has_zero_loss(loss_fn):
    logprobs, batch = of_ratios([[1.0]], [[1.0]])
    loss, metrics = loss_fn(logprobs[:0, :0], batch.select([]))
    assert loss.item() == 0
    assert metrics["policy/ratio_max"].item() == 0


@every_policy_loss
def test_one_advantage_a_response_is_an_error_that_names_expand(loss_fn):
    logprobs, batch = of_ratios([[1.0, 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    batch["advantages"] = torch.ones(2)  # [B] would broadcast over [B, T] where B = T
    with pytest.raises(ValueError, match=r"advantages: got shape \(2,\), need \(2, 2\).*expand"):
        loss_fn(logprobs, batch)


@every_policy_loss
def test_old_logprobs_of_another_width_are_an_error(loss_fn):
    logprobs, batch = of_ratios([[1.0, 1.0]], [[1.0, 1.0]])
    batch["old_logprobs"] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"old_logprobs: got shape \(1, 1\), need \(1, 2\)"):
        loss_fn(logprobs, batch)


@every_policy_loss
def test_metrics_are_detached_scalars_of_the_glossary(loss_fn):
    logprobs, batch = of_ratios([[1.1, 0.9]], [[2.0, -1.0]])
    loss, metrics = loss_fn(logprobs, batch)
    assert metrics.keys() <= GLOSSARY.keys()
    assert metrics["policy/loss"].item() == loss.item()  # faults B14
    assert all(x.ndim == 0 and not x.requires_grad for x in metrics.values())


@every_loss
def test_loss_has_the_parameters_of_its_contract(loss_fn):
    first, second = list(inspect.signature(loss_fn).parameters)[:2]
    assert first in ("logprobs", "values", "entropy")
    assert second == "batch"
