import functools

import pytest
import torch

from rlkit.algo import (
    kl_k1,
    masked_sum,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlkit.batch import Batch

per_length = functools.partial(seq_mean_token_sum, length=8)
LOSSES = torch.tensor([[4.0, 0, 0], [1, 1, 1]])
MASK = torch.tensor([[1, 0, 0], [1, 1, 1]])


def one_and_three_tokens():
    """Two responses: one token of loss 4, three tokens of loss 1."""
    return Batch.from_columns(
        {
            "response_ids": [torch.tensor([7]), torch.tensor([7, 8, 9])],
            "response_mask": [torch.ones(1), torch.ones(3)],
            "losses": [torch.tensor([4.0]), torch.tensor([1.0, 1, 1])],
        }
    )


@pytest.mark.parametrize(
    ("aggregate", "value"),
    [
        (token_mean, 1.75),
        (seq_mean_token_mean, 2.5),
        (seq_mean_token_sum, 3.5),
        (per_length, 0.4375),
    ],
)
def test_two_sequences_by_each_aggregation(aggregate, value):  # faults B2
    batch = Batch.from_columns({"response_mask": MASK})
    assert aggregate(LOSSES, batch).item() == value


def test_token_mean_of_micro_batches_divides_by_the_tokens_of_the_step():  # faults B1
    (step,) = one_and_three_tokens().minibatches(1)
    parts = [token_mean(micro["losses"], micro).item() for micro in step.microbatches(3)]
    assert len(parts) == 2
    assert sum(parts) == 1.75


@pytest.mark.parametrize("aggregate", [token_mean, seq_mean_token_mean, seq_mean_token_sum])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_data_parallel_ranks_add_up_to_one_batch(aggregate, ranks):  # faults B1
    (step,) = one_and_three_tokens().minibatches(1)
    total = 0.0
    for rank in range(ranks):  # the third rank has no rows
        for micro in step.shard(rank, ranks).microbatches(3):
            total += aggregate(micro["losses"], micro).item()
    assert total == aggregate(step["losses"], step).item()


@pytest.mark.parametrize("aggregate", [token_mean, seq_mean_token_mean, seq_mean_token_sum])
def test_all_zero_mask_gives_zero_and_no_gradient(aggregate):  # faults B3
    batch = Batch.from_columns({"response_mask": torch.zeros(1, 2)})
    x = torch.tensor([[3.0, torch.nan]], requires_grad=True)
    result = aggregate(x, batch)
    assert result.item() == 0
    assert torch.autograd.grad(result, x)[0].tolist() == [[0, 0]]


def test_mean_kl_counts_the_mask_not_the_width():  # faults B3
    mask = torch.tensor([[1.0, 0, 1, 0]])
    batch = Batch.from_columns({"response_mask": mask})
    kl = kl_k1(mask, torch.zeros_like(mask))  # [1, 0, 1, 0]
    assert token_mean(kl, batch).item() == 1.0


def test_sums_over_counts_not_means_of_means():  # faults B14
    batch = Batch.from_columns(
        {
            "response_ids": [torch.arange(1), torch.arange(3)],
            "response_mask": [torch.ones(1), torch.ones(3)],
            "x": [torch.tensor([4.0]), torch.tensor([2.0, 1.0, 1.0])],
        }
    ).as_step()
    parts = [token_mean(micro["x"], micro).item() for micro in batch.microbatches(3)]
    assert sum(parts) == 2.0


def test_row_without_trainable_tokens_counts_as_a_row_of_zero():
    batch = Batch.from_columns({"response_mask": torch.tensor([[0, 0], [1, 1]])})
    x = torch.tensor([[9.0, 9.0], [1.0, 3.0]])
    assert seq_mean_token_mean(x, batch).item() == 1.0
    assert seq_mean_token_sum(x, batch).item() == 2.0


def test_length_is_the_only_difference_between_sum_and_per_length():
    batch = Batch.from_columns({"response_mask": MASK})
    ratio = seq_mean_token_sum(LOSSES, batch) / per_length(LOSSES, batch)
    assert ratio.item() == 8
    assert masked_sum(LOSSES, MASK).tolist() == [4, 3]
