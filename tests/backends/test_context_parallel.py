"""Ranks that share sequences: who reads which token, and attention as of one rank."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.backends.context_parallel import SharedAttention, part_of, places_of
from rlkit.backends.memory import saved_bytes
from rlkit.backends.packing import Packed, padded
from rlkit.batch.rows import Rows
from rlkit.models.attention import PackedAttention

CPU = torch.device("cpu")


def packed(prompts: list[int], responses: list[int]) -> Packed:
    """Rows of tokens 10, 11, ...; a response's last token is not read."""
    prompts, responses = torch.tensor(prompts), torch.tensor(responses)
    lengths = prompts + responses - 1
    starts = lengths.cumsum(0) - lengths
    predict = [
        start + p - 1 + torch.arange(n)
        for start, p, n in zip(starts, prompts, responses, strict=True)
    ]
    num = int(responses.sum())
    targets = Rows(torch.arange(100, 100 + num), responses)
    ids = torch.arange(10, 10 + int(lengths.sum()))
    return Packed(ids, lengths, torch.cat(predict), targets, torch.ones(num))


def parts(whole: Packed | None, *, cp: int, tp: int = 1):
    of = lambda rank: SimpleNamespace(size=lambda: cp, rank=lambda: rank)
    return [part_of(whole, tp=tp, group=of(rank), device=CPU) for rank in range(cp)]


def test_rank_r_has_chunks_r_and_the_rth_from_the_end():
    assert places_of(torch.tensor([8, 4]), 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert places_of(torch.tensor([8, 4]), 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


def test_padding_keeps_what_predicts_which_token():
    found = padded(packed([2, 3], [4, 1]), multiple=4)
    assert found.lengths.tolist() == [8, 4]
    assert found.ids.tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 15, 16, 17, 0]
    assert found.predict.tolist() == [1, 2, 3, 4, 10]


@given(
    rows=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4),
    cp=st.sampled_from([2, 3, 4]),
    tp=st.sampled_from([1, 2, 3]),
)
def test_each_response_token_is_predicted_by_one_rank_from_the_right_token(rows, cp, tp):
    whole = packed(*map(list, zip(*rows, strict=True)))
    found = parts(whole, cp=cp, tp=tp)
    sizes = {len(part.ids) for part in found}
    assert len(sizes) == 1
    assert sizes.pop() % tp == 0
    mine = torch.cat([part.mine for part in found])
    assert sorted(mine.tolist()) == list(range(len(whole.temperature)))
    before = torch.cat([part.ids[part.predict] for part in found])
    assert before[mine.argsort()].tolist() == whole.ids[whole.predict].tolist()


def test_a_filler_has_tokens_on_each_rank():
    assert [(len(part.ids), len(part.mine)) for part in parts(None, cp=2, tp=2)] == [(2, 0)] * 2


@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_of_all_ranks_is_that_of_one(cp, heads):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([2, 1, 3]) * 2 * cp
    draw = lambda heads: torch.randn(int(lengths.sum()), heads, 8, generator=generator)
    q, k, v = draw(heads).requires_grad_(), draw(2).requires_grad_(), draw(2).requires_grad_()
    weight = torch.randn(q.shape, generator=generator)
    expected = PackedAttention(lengths)(0, q, k, v)
    gradients = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    places = [places_of(lengths, rank, cp) for rank in range(cp)]
    found = torch.empty_like(q)
    for rank, mine in enumerate(places):
        wholes = iter((k, v))  # as gathered
        attend = SharedAttention(lengths, rank, cp, lambda _, wholes=wholes: next(wholes))
        found = found.index_copy(0, mine, attend(0, q[mine], k[mine], v[mine]))
    torch.testing.assert_close(found, expected)
    for got, value in zip(
        torch.autograd.grad((found * weight).sum(), (q, k, v)), gradients, strict=True
    ):
        torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rank", [0, 1])
def test_attention_keeps_twice_as_much_of_twice_as_many_tokens(rank):
    kept = []
    for num in (400, 800):
        q = torch.randn(num // 2, 4, 8, requires_grad=True)
        k, v = (torch.randn(num, 2, 8, requires_grad=True) for _ in range(2))
        attend = SharedAttention(torch.tensor([num]), rank, 2, lambda tensor: tensor)
        with saved_bytes([]) as found:
            attend(0, q, k, v)
        kept += found
    assert kept[1] == pytest.approx(2 * kept[0], rel=1e-3)
