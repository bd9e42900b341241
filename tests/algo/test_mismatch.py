"""How far the trainer's logprobs are from the engine's, by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_batches import steps

from rlkit.algo import RATIO_BINS, mismatch_metrics
from rlkit.batch import Batch
from rlkit.glossary import GLOSSARY


def of_ratios(*ratios, mask=None):
    """Metrics of one response whose tokens the trainer finds so many times as likely."""
    old = torch.tensor([ratios], dtype=torch.float64).log() - 1
    columns = {"old_logprobs": old, "rollout_logprobs": torch.full_like(old, -1.0)}
    columns["response_mask"] = torch.tensor([mask or [1] * len(ratios)])
    return {k: v.item() for k, v in mismatch_metrics(Batch.from_columns(columns)).items()}


def test_distances_and_kl_are_those_by_hand():
    found = of_ratios(2.0, 0.5, 1.0, 1.0)
    assert found["mismatch/logprob_mean"] == pytest.approx(2 * math.log(2) / 4)
    assert found["mismatch/logprob_max"] == pytest.approx(math.log(2))
    # r − 1 − log r: 1 − log 2, log 2 − 0.5, 0, 0
    assert found["mismatch/kl"] == pytest.approx(0.5 / 4)


def test_tokens_are_counted_by_ratio():
    found = of_ratios(0.3, 0.7, 0.95, 1.0, 1.0, 1.05, 1.5, 30.0)
    assert [found[name] for name in RATIO_BINS] == [1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 8, 1 / 8, 1 / 8]


def test_tokens_under_the_mask_count_nowhere():
    found = of_ratios(1.0, 50.0, mask=[1, 0])
    assert found["mismatch/logprob_max"] == found["mismatch/logprob_mean"] == 0
    assert found["mismatch/ratio_0.99_to_1.01_fraction"] == 1
    assert found["mismatch/ratio_above_2_fraction"] == 0


def test_a_ratio_beyond_fp32_stays_finite():
    assert math.isfinite(of_ratios(math.exp(200))["mismatch/kl"])


@given(steps())
def test_shares_add_up_to_one_and_the_kl_is_not_negative(step):
    found = mismatch_metrics(step[0])
    if step[0].step_tokens:
        assert float(sum(found[name] for name in RATIO_BINS)) == pytest.approx(1)
    assert found["mismatch/kl"] >= 0


@given(steps(), st.integers(1, 40))
def test_pieces_of_a_step_add_up(step, budget):
    (minibatch,) = step[0].minibatches(1, seed=0)
    whole = mismatch_metrics(minibatch)
    pieces = [mismatch_metrics(piece) for piece in minibatch.microbatches(budget)]
    for name, value in whole.items():
        parts = torch.stack([piece[name] for piece in pieces])
        got = parts.max() if name.endswith("_max") else parts.sum()
        torch.testing.assert_close(got, value)


def test_the_glossary_has_the_bins_in_their_order():
    assert tuple(name for name in GLOSSARY if name.startswith("mismatch/ratio_")) == RATIO_BINS
