"""Lengths and runs: the mean is kept by the cut, wrong sizes are named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import LENGTHS, WORKLOAD, small_run

import rlkit.sim as sim


@given(st.floats(0.02, 0.6), st.floats(0.2, 1.2))
def test_the_mean_after_the_cut_is_the_one_asked_for(share, sigma):
    lengths = sim.Lengths(mean_tokens=share * 8192, sigma=sigma, limit_tokens=8192)
    drawn = lengths.draw(np.random.default_rng(0), 20_000, 4)
    assert drawn.mean() == pytest.approx(share * 8192, rel=0.05)
    assert (drawn**2).mean() == pytest.approx(lengths.moments()[1], rel=0.1)
    assert drawn.max() <= 8192


def test_a_lower_limit_shortens_the_same_responses():
    cut = LENGTHS.cut(2048)
    assert cut.log_mean == pytest.approx(LENGTHS.log_mean, abs=1e-6)
    assert cut.mean_tokens < LENGTHS.mean_tokens
    one = LENGTHS.draw(np.random.default_rng(1), 10, 4)
    other = cut.draw(np.random.default_rng(1), 10, 4)
    np.testing.assert_allclose(other, one.clip(max=2048), rtol=1e-6)


def test_responses_of_a_prompt_are_alike():
    drawn = np.log(LENGTHS.draw(np.random.default_rng(0), 4000, 8))
    between = drawn.mean(axis=1).var() / drawn.var()
    assert between == pytest.approx(0.5 + 0.5 / 8, abs=0.04)


def test_the_same_seed_draws_the_same_lengths():
    one, two = (LENGTHS.draw(np.random.default_rng(3), 5, 2) for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(LENGTHS, mean_tokens=9000), "mean_tokens: got 9000, need 1 or more"),
        (lambda: replace(LENGTHS, sigma=0.0), "sigma: got 0.0"),
        (lambda: small_run(rollout_devices=16), "rollout_devices: got 16 of 16"),
        (lambda: small_run(chunks=5), "chunks: got 5 for 32 prompts"),
    ],
)
def test_wrong_sizes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_devices_are_split_into_engines_and_ranks():
    run = small_run()
    assert (run.num_engines, run.train_devices, run.train_dp) == (12, 4, 2)
    assert WORKLOAD.sequences == 128
    assert run.moments[0] == pytest.approx(1100)
