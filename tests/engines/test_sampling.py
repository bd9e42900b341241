import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.sampling import Cut, cut_off, noise, sample

UIDS = np.array([0, 1, 2, 65536, (1 << 57) + 3])


def tokens_of(logits, uniform, temperature=1.0):
    """Tokens sampled from one row of logits, one a uniform number."""
    uniform = torch.tensor(uniform, dtype=torch.float64)
    rows = torch.tensor(logits).expand(len(uniform), -1)
    return sample(rows, torch.full((len(uniform),), float(temperature)), uniform)[0].tolist()


# ---- noise ----


def test_noise_is_spread_evenly_over_0_to_1():
    draws = noise(0, np.arange(500), 40)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, bins=10, range=(0, 1))[0]
    assert abs(counts - 2000).max() < 5 * 2000**0.5


def test_noise_of_neighbours_is_not_correlated():
    draws = noise(0, np.arange(1000), 20) - 0.5
    for one, next_to_it in [(draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])]:
        assert abs((one * next_to_it).mean() * 12) < 5 / one.size**0.5


def test_noise_is_the_same_for_the_same_seed_uid_and_position():
    assert np.array_equal(noise(7, UIDS, 5), noise(7, UIDS, 5))


def test_noise_of_a_uid_does_not_depend_on_its_place_among_others():
    assert np.array_equal(noise(7, UIDS[::-1], 5), noise(7, UIDS, 5)[::-1])


def test_noise_of_a_position_does_not_depend_on_how_many_are_drawn():
    assert np.array_equal(noise(7, UIDS, 3), noise(7, UIDS, 9)[:, :3])


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_noise_differs_between_uids_and_positions(seed):
    assert len(np.unique(noise(seed, UIDS, 50))) == UIDS.size * 50


def test_noise_differs_between_seeds():
    assert not (noise(0, UIDS, 5) == noise(1, UIDS, 5)).any()


# ---- sample ----


def test_the_token_is_where_the_cumulative_probability_passes_the_number():
    logits = np.log([0.2, 0.5, 0.3]).tolist()
    assert tokens_of(logits, [0, 0.19, 0.21, 0.69, 0.71, 0.999]) == [0, 0, 1, 1, 2, 2]


def test_a_lower_temperature_sharpens():
    logits = np.log([0.2, 0.5, 0.3]).tolist()  # squared and normed: 4, 25 and 9 of 38
    assert tokens_of(logits, [0.1, 0.11, 0.76, 0.77], temperature=0.5) == [0, 1, 1, 2]


@given(
    st.lists(st.sampled_from([-float("inf"), -3.0, 0.0, 2.0]), min_size=2, max_size=6),
    st.sampled_from([0.0, 0.3, 0.999999, 1 - 2**-53]),
)
def test_a_token_of_probability_zero_is_never_sampled(logits, uniform):
    logits = [0.0, *logits]
    (token,) = tokens_of(logits, [uniform])
    assert logits[token] > -float("inf")
    (token,) = tokens_of(logits[::-1], [uniform])
    assert logits[::-1][token] > -float("inf")


def test_temperature_zero_takes_the_most_likely_token():
    assert tokens_of([1.0, 3.0, 2.0], [0.0, 0.5, 0.999], temperature=0) == [1, 1, 1]


def test_greedy_and_sampled_rows_mix():
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(2, -1)
    uniform = torch.full((2,), 0.999, dtype=torch.float64)
    assert sample(logits, torch.tensor([0.0, 1.0]), uniform)[0].tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(temperature):
    logits = torch.tensor([[2.0, 0.0]])
    uniform = torch.tensor([0.0], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.tensor([temperature]), uniform)
    expected = torch.log_softmax(logits / (temperature or 1.0), -1)[0, 0]
    assert tokens.tolist() == [0]
    torch.testing.assert_close(logprobs, expected[None])


def test_logprobs_of_bfloat16_logits_are_float32():
    logits = torch.tensor([[2.0, 0.0]], dtype=torch.bfloat16)
    uniform = torch.tensor([0.0], dtype=torch.float64)
    assert sample(logits, torch.tensor([1.0]), uniform)[1].dtype == torch.float32


# ---- large vocabularies ----


@given(st.integers(1, 1200), st.integers(0, 2**32 - 1))
def test_the_token_of_any_vocabulary_is_where_the_whole_sum_passes_the_number(size, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, size, generator=generator)
    uniform = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(4), uniform)
    exact = logits.double().softmax(-1).cumsum(-1)  # [4, V]
    rows = torch.arange(4)
    assert (exact[rows, tokens] > uniform - 1e-6).all()
    below = torch.where(tokens > 0, exact[rows, (tokens - 1).clamp(min=0)], 0.0)
    assert (below < uniform + 1e-6).all()
    expected = logits.log_softmax(-1)[rows, tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


# ---- cutting tokens off ----


def cut_of(num=1, *, top_k=0, top_p=1.0, min_p=0.0):
    """The same cut for every row."""
    return Cut(torch.full((num,), top_k), torch.full((num,), top_p), torch.full((num,), min_p))


def kept(probabilities, **cut):
    """Tokens that a cut leaves."""
    return cut_off(torch.tensor([probabilities]), cut_of(**cut))[0].nonzero()[:, 0].tolist()


PROBABILITIES = [0.1, 0.4, 0.05, 0.25, 0.2]


@pytest.mark.parametrize(
    ("cut", "tokens"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [1, 3]),  # 0.4 + 0.25 is the first sum of at least 0.6
        ({"top_p": 0.66}, [1, 3, 4]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 0.5}, [1, 3, 4]),  # at least 0.2
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.7}, [1, 3]),  # 0.65 of the 0.85 that top_k leaves is over 0.7
        ({"min_p": 0.25, "top_p": 0.9}, [0, 1, 3, 4]),  # 0.85 of the 0.95 left is below 0.9
    ],
)
def test_a_cut_leaves_these_tokens(cut, tokens):
    assert kept(PROBABILITIES, **cut) == tokens


def test_of_equal_tokens_the_lower_ids_stay():
    assert kept([0.25] * 4, top_k=2) == kept([0.25] * 4, top_p=0.5) == [0, 1]


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any),
    st.integers(0, 10),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
)
def test_a_cut_leaves_the_most_likely_tokens_unchanged(weights, top_k, top_p, min_p):
    before = torch.tensor([weights], dtype=torch.float32) / max(weights)
    after = cut_off(before, cut_of(top_k=top_k, top_p=top_p, min_p=min_p))
    stays = after > 0
    assert torch.equal(after[stays], before[stays])
    assert 1 <= int(stays.sum()) <= (top_k or 9)
    assert bool(stays.all()) or before[stays].min() >= before[~stays].max()
    assert before[stays].min() >= min_p * before.max()


@given(st.integers(0, 2**32 - 1))
def test_rows_are_cut_by_their_own_limits(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 300, generator=generator)
    uniform = torch.rand(3, generator=generator, dtype=torch.float64)
    cut = Cut(torch.tensor([0, 5, 0]), torch.tensor([1.0, 1.0, 0.3]), torch.zeros(3))
    together = sample(logits, torch.ones(3), uniform, cut)[0]
    for row in range(3):
        mine = Cut(*(limit[row : row + 1] for limit in cut))
        alone = sample(logits[row : row + 1], torch.ones(1), uniform[row : row + 1], mine)[0]
        assert alone == together[row]
    assert together[0] == sample(logits[:1], torch.ones(1), uniform[:1])[0]
    assert together[1] in logits[1].topk(5).indices


def test_logprobs_are_those_before_the_cut():
    logits = torch.tensor(PROBABILITIES).log()[None]
    uniform = torch.tensor([0.99], dtype=torch.float64)
    tokens, logprobs = sample(logits, torch.ones(1), uniform, cut_of(top_k=2))
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.25]))


def test_a_cut_counts_at_the_sampling_temperature():
    logits = torch.tensor([[4.0, 3.0, 0.0]])
    uniform = torch.tensor([0.999], dtype=torch.float64)
    cut = cut_of(min_p=0.5)  # exp(-1 / 0.5) is below, exp(-1 / 2) above
    assert sample(logits, torch.tensor([0.5]), uniform, cut)[0].tolist() == [0]
    assert sample(logits, torch.tensor([2.0]), uniform, cut)[0].tolist() == [1]


def test_greedy_rows_are_not_cut():
    logits = torch.tensor([[1.0, 3.0, 2.0]]).expand(2, -1)
    uniform = torch.zeros(2, dtype=torch.float64)
    cut = cut_of(2, top_k=1)
    assert sample(logits, torch.tensor([0.0, 1.0]), uniform, cut)[0].tolist() == [1, 1]
