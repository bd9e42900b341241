import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import masked_sum, response_mask


def test_mask_ends_with_the_first_stop_token_when_pad_is_the_stop_token():  # faults C3
    mask, truncated = response_mask(torch.tensor([[5, 6, 2, 2, 2]]), stop_token_ids=(2,))
    assert mask.tolist() == [[1, 1, 1, 0, 0]]
    assert truncated.tolist() == [False]


def test_response_without_stop_token_is_all_ones_and_truncated():  # faults C3
    mask, truncated = response_mask(torch.tensor([[5, 6, 7, 8, 9]]), stop_token_ids=(2,))
    assert mask.tolist() == [[1, 1, 1, 1, 1]]
    assert truncated.tolist() == [True]


def test_stop_token_in_the_padding_does_not_count():
    ids = torch.tensor([[5, 6, 2, 2], [5, 2, 2, 2]])
    mask, truncated = response_mask(ids, stop_token_ids=[2], lengths=torch.tensor([2, 4]))
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert truncated.tolist() == [True, False]


def test_any_of_several_stop_tokens_ends_a_response():
    ids = torch.tensor([[4, 3, 2, 4], [4, 2, 3, 4]])
    mask, _ = response_mask(ids, stop_token_ids={2, 3})
    assert mask.sum(1).tolist() == [2, 2]


def test_no_stop_tokens_keeps_every_token():
    mask, truncated = response_mask(torch.tensor([[2, 2]]), stop_token_ids=())
    assert mask.tolist() == [[1, 1]]
    assert truncated.tolist() == [True]


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 4), min_size=6, max_size=6), min_size=1, max_size=5))
def test_mask_equals_a_loop_over_tokens(rows):
    mask, truncated = response_mask(torch.tensor(rows), stop_token_ids=(0, 3))
    for row, got, cut in zip(rows, mask.tolist(), truncated.tolist(), strict=True):
        ends = [t for t, token in enumerate(row) if token in (0, 3)]
        num = ends[0] + 1 if ends else len(row)
        assert got == [True] * num + [False] * (len(row) - num)
        assert cut == (not ends)


def test_masked_sum_ignores_nan_under_the_mask_in_value_and_gradient():
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]], requires_grad=True)
    total = masked_sum(x, torch.tensor([[1, 0], [1, 1]]))
    total.sum().backward()
    assert total.tolist() == [1, 5]
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 0], [1, 1]]
