import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.engines.sampling import noise, sample

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
