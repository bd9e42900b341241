import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.algo import entropy_from_logits, logprobs_from_logits, next_token_rows

seeds = st.integers(0, 2**31)


def naive_logprobs(logits, tokens, temperature=1.0):
    """One token at a time, in Python floats."""
    out = []
    for row, token in zip(logits.double().tolist(), tokens.tolist(), strict=True):
        scaled = [x / temperature for x in row]
        largest = max(scaled)
        total = sum(math.exp(x - largest) for x in scaled)
        out.append(scaled[token] - largest - math.log(total))
    return out


def test_row_before_a_token_predicts_it():  # faults C1
    ids = torch.tensor([0, 1, 2])
    logits = torch.tensor([[0.0, 3, 0], [0, 0, 3], [3, 0, 0]])
    rows = next_token_rows(torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
    logprobs = logprobs_from_logits(logits[rows], ids[1:])
    assert rows.tolist() == [0, 1]
    assert logprobs.tolist() == pytest.approx([-0.0949, -0.0949], abs=5e-5)


def test_prompts_of_different_lengths_align_separately():  # faults C1
    rows = next_token_rows(torch.tensor([0, 5]), torch.tensor([2, 4]), torch.tensor([3, 1]))
    assert rows.tolist() == [1, 2, 3, 8]


def test_padding_between_packed_sequences_is_skipped_by_starts():
    rows = next_token_rows(torch.tensor([0, 8]), torch.tensor([2, 1]), torch.tensor([1, 2]))
    assert rows.tolist() == [1, 8, 9]


def test_empty_response_takes_no_row():
    rows = next_token_rows(torch.tensor([0, 2]), torch.tensor([2, 1]), torch.tensor([0, 1]))
    assert rows.tolist() == [2]


def test_empty_prompt_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"got 0, need at least 1.*start-of-text"):
        next_token_rows(torch.tensor([0]), torch.tensor([0]), torch.tensor([2]))


@settings(deadline=None)
@given(seeds, st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=5))
def test_packed_logprobs_equal_a_loop_over_tokens(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 7, (p + r,), generator=generator) for p, r in lengths]
    logits = [torch.randn(len(ids), 7, generator=generator) for ids in sequences]
    prompts = torch.tensor([p for p, _ in lengths])
    responses = torch.tensor([r for _, r in lengths])
    starts = (prompts + responses).cumsum(0) - prompts - responses
    rows = next_token_rows(starts, prompts, responses)
    got = logprobs_from_logits(torch.cat(logits)[rows], torch.cat(sequences)[rows + 1])
    expected = [
        naive_logprobs(rows_of[s - 1 : s], ids[s : s + 1])[0]
        for (p, r), ids, rows_of in zip(lengths, sequences, logits, strict=True)
        for s in range(p, p + r)
    ]
    assert got.tolist() == pytest.approx(expected, abs=1e-5)


@settings(deadline=None)
@given(seeds, st.floats(0.1, 3))
def test_temperature_divides_the_logits(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 7, generator=generator)
    tokens = torch.randint(0, 7, (5,), generator=generator)
    got = logprobs_from_logits(logits, tokens, temperature=temperature)
    assert got.tolist() == pytest.approx(naive_logprobs(logits, tokens, temperature), abs=1e-4)


@settings(deadline=None)
@given(seeds)
def test_content_of_padding_is_irrelevant_to_other_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 7, generator=generator)
    tokens = torch.randint(0, 7, (3, 4), generator=generator)
    mask = torch.rand(3, 4, generator=generator) < 0.5
    other = torch.where(mask[..., None], logits, torch.randn(3, 4, 7, generator=generator))
    others = torch.where(mask, tokens, torch.zeros_like(tokens))
    before, after = logprobs_from_logits(logits, tokens), logprobs_from_logits(other, others)
    assert torch.equal(before[mask], after[mask])


def test_ratio_is_off_if_only_the_engine_has_the_temperature():  # faults C4
    logits, tokens = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    engine = logprobs_from_logits(logits, tokens, temperature=0.6)
    ratio = (logprobs_from_logits(logits, tokens) - engine).exp()
    assert ratio.tolist() == pytest.approx([0.912, 3.461], abs=5e-4)


def test_matching_temperature_gives_ratio_one():  # faults C4
    logits, tokens = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    engine = logprobs_from_logits(logits, tokens, temperature=0.6)
    trainer = logprobs_from_logits(logits, tokens, temperature=torch.tensor([0.6, 0.6]))
    assert torch.equal((trainer - engine).exp(), torch.ones(2))


def test_temperature_zero_counts_as_one():  # faults C4
    logits, tokens = torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1])
    expected = logprobs_from_logits(logits, tokens)
    assert torch.equal(logprobs_from_logits(logits, tokens, temperature=0), expected)
    zeros = torch.tensor([0.0, 0.0])
    assert torch.equal(logprobs_from_logits(logits, tokens, temperature=zeros), expected)


def test_temperature_zero_has_no_nan_in_the_gradient():
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)
    temperature = torch.tensor([0.0])
    logprobs_from_logits(logits, torch.tensor([0]), temperature=temperature).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_temperature_of_a_row_applies_to_all_its_tokens():
    logits = torch.randn(2, 2, 5, generator=torch.Generator().manual_seed(0))  # B = T = 2
    tokens = torch.tensor([[0, 1], [2, 3]])
    got = logprobs_from_logits(logits, tokens, temperature=torch.tensor([0.5, 2.0]))
    assert torch.equal(got[0], logprobs_from_logits(logits[0], tokens[0], temperature=0.5))
    assert torch.equal(got[1], logprobs_from_logits(logits[1], tokens[1], temperature=2.0))


def test_temperature_of_the_wrong_shape_is_an_error():
    logits, tokens = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"temperature: got shape \(3,\), need a number or"):
        logprobs_from_logits(logits, tokens, temperature=torch.ones(3))


def test_negative_temperature_is_an_error():
    logits, tokens = torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="temperature: got -1"):
        logprobs_from_logits(logits, tokens, temperature=-1.0)


def test_half_logits_give_float32_logprobs():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = torch.tensor([0, 1, 2])
    got = logprobs_from_logits(logits, tokens)
    assert got.dtype == torch.float32
    assert torch.equal(got, logprobs_from_logits(logits.float(), tokens))


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0], [-1e4, 0.0]])
    assert logprobs_from_logits(logits, torch.tensor([0, 0])).tolist() == [0, -1e4]


@settings(deadline=None)
@given(seeds)
def test_gradient_is_one_hot_minus_probability(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 6, generator=generator).requires_grad_()
    tokens = torch.randint(0, 6, (4,), generator=generator)
    logprobs_from_logits(logits, tokens).sum().backward()
    expected = torch.nn.functional.one_hot(tokens, 6) - logits.detach().softmax(-1)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_entropy_of_a_uniform_row_is_log_v():
    got = entropy_from_logits(torch.full((2, 3, 8), 5.0))
    assert got.shape == (2, 3)
    assert torch.allclose(got, torch.full((2, 3), math.log(8)))


def test_entropy_equals_minus_sum_p_log_p():
    logits = torch.tensor([[0.3, -0.2, 0.1]])
    p = [math.exp(x) / sum(map(math.exp, (0.3, -0.2, 0.1))) for x in (0.3, -0.2, 0.1)]
    assert entropy_from_logits(logits).item() == pytest.approx(-sum(x * math.log(x) for x in p))


def test_tokens_ruled_out_add_nothing_to_the_entropy():
    logits = torch.tensor([[1.0, 2.0, -torch.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    short = torch.tensor([[1.0, 2.0]], requires_grad=True)
    entropy_from_logits(short).sum().backward()
    assert torch.allclose(entropy, entropy_from_logits(short))
    assert logits.grad is not None
    assert short.grad is not None
    assert torch.allclose(logits.grad, torch.cat([short.grad, torch.zeros(1, 1)], 1))


def test_entropy_uses_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    assert torch.allclose(
        entropy_from_logits(logits, temperature=0.5), entropy_from_logits(logits * 2)
    )
