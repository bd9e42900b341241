import pytest
import torch
from hypothesis import given, settings
from loss_batches import POLICY_LOSSES, of_ratios, steps

import rlkit as rk
from rlkit.algo import cispo_loss, clipped_policy_loss, compare_losses, sapo_loss


def frozen():
    """One row of three tokens, the last under the mask, and its logprobs."""
    logprobs, batch = of_ratios([[1.5, 1.0, 9.0]], [[1.0, -1.0, 1.0]], mask=[[1, 1, 0]])
    batch["logprobs"] = logprobs.detach()
    return batch


def test_a_row_an_objective_and_trainable_token():
    frame = compare_losses(frozen(), {"PPO": clipped_policy_loss, "CISPO": cispo_loss})
    assert frame["objective"].tolist() == ["PPO", "PPO", "CISPO", "CISPO"]
    assert frame["token"].tolist() == [0, 1, 0, 1]
    assert frame["uid"].tolist() == [0] * 4
    assert frame["advantage"].tolist() == [1, -1, 1, -1]
    assert frame["ratio"].tolist() == pytest.approx([1.5, 1, 1.5, 1])


def test_gradient_is_that_of_the_loss_and_clipped_is_where_it_is_gone():
    frame = compare_losses(frozen(), {"PPO": clipped_policy_loss, "CISPO": cispo_loss})
    assert frame["gradient"].tolist() == pytest.approx([0, 0.5, -0.6, 0.5])
    assert frame["clipped"].tolist() == [True, False, False, False]
    assert frame["loss"][0] == pytest.approx((-1.2 + 1) / 2)


def test_a_token_without_advantage_is_not_clipped():
    batch = frozen()
    batch["advantages"] = torch.zeros(1, 3)
    assert not compare_losses(batch, {"PPO": clipped_policy_loss})["clipped"].any()


def test_losses_of_the_users_may_take_the_entropy_or_ignore_the_logprobs():
    batch = frozen()
    batch["entropy"] = torch.ones(1, 3)

    def with_entropy(logprobs, batch, entropy):
        loss, metrics = sapo_loss(logprobs, batch)
        return loss - batch.token_mean(entropy), metrics

    def constant(logprobs, batch):
        return torch.tensor(3.0), {}

    frame = compare_losses(batch, {"SAPO": sapo_loss, "more": with_entropy, "none": constant})
    loss = frame.groupby("objective", sort=False)["loss"].first().tolist()
    assert loss[1] == pytest.approx(loss[0] - 1)
    assert loss[2] == 3
    assert (frame["gradient"][frame["objective"] == "none"] == 0).all()


def test_logprobs_may_be_passed():
    batch = frozen()
    frame = compare_losses(
        batch, {"PPO": clipped_policy_loss}, logprobs=batch["old_logprobs"].requires_grad_()
    )
    assert frame["ratio"].tolist() == [1, 1]


def test_no_losses_are_an_error():
    with pytest.raises(ValueError, match="losses: got none"):
        compare_losses(frozen(), {})


def test_a_batch_without_logprobs_says_so():
    batch = frozen()
    del batch["logprobs"]
    with pytest.raises(KeyError, match="no column 'logprobs'"):
        compare_losses(batch, {"PPO": clipped_policy_loss})


@settings(max_examples=20)
@given(steps())
def test_summary_is_of_the_tokens_of_each_objective(step):
    batch, table = step
    batch = batch.as_step()
    width = int(batch.lengths("response_ids").max())
    frame = compare_losses(batch, POLICY_LOSSES, logprobs=table[:, :width])
    if not batch.step_tokens:
        assert frame.empty
        return
    summary = rk.viz.loss_summary(frame)
    assert list(summary.index) == list(POLICY_LOSSES)
    assert (summary["num_tokens"] == batch.step_tokens).all()
    clipped, _ = clipped_policy_loss(table[:, :width], batch)
    assert summary["loss"]["clipped"] == pytest.approx(clipped.item())
