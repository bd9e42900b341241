"""Logprobs of a long vocabulary: the logits of some rows at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import make_model, make_prompts

from rlkit.algo import entropy_from_logits, logprobs, logprobs_from_logits, per_token_from_hidden
from rlkit.config import SamplingParams
from rlkit.engines import Request, TorchEngine

WHOLE_MIB = 1536 * 150_000 * 4 / 2**20
CHILD = """
import torch
from rlkit import device
from rlkit.algo import per_token_from_hidden
torch.set_num_threads(1)
torch.manual_seed(0)
head = torch.nn.Linear(16, 150_000, bias=False)
hidden, tokens = torch.randn(1536, 16, requires_grad=True), torch.randint(150_000, (1536,))
device.reset_peak("cpu")
before = device.allocated_bytes("cpu")
found = per_token_from_hidden(hidden, head.weight, tokens, entropy=True)
sum(x.sum() for x in found).backward()
print((device.peak_bytes("cpu") - before) / 2**20)
"""


def values_and_gradients(size, monkeypatch, *, entropy):
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", size)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (10, 7)
    )
    tokens = torch.randint(7, (10,), generator=generator)
    temperature = torch.tensor([1.0, 0.5] * 5, dtype=torch.float64)
    found = per_token_from_hidden(hidden, weight, tokens, temperature=temperature, entropy=entropy)
    factors = torch.randn(10, generator=generator, dtype=torch.float64)
    sum((factors[: len(x)] * x).sum() for x in found).backward()
    return [x.detach() for x in found] + [hidden.grad, weight.grad]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("size", [1, 7, 21, 63])
def test_values_and_gradients_are_those_of_all_at_once(size, entropy, monkeypatch):
    whole = values_and_gradients(10**6, monkeypatch, entropy=entropy)
    pieces = values_and_gradients(size, monkeypatch, entropy=entropy)
    assert [len(x) for x in whole[:2]] == [10, 10 * entropy]
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_all_at_once_is_logits_then_logprobs():
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    tokens = torch.randint(7, (5,))
    found = per_token_from_hidden(hidden, weight, tokens, temperature=0.5, entropy=True)
    logits = hidden @ weight.T
    assert torch.equal(found[0], logprobs_from_logits(logits, tokens, temperature=0.5))
    assert torch.equal(found[1], entropy_from_logits(logits, temperature=0.5))


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_alone_has_the_gradient_that_logits_have(used, monkeypatch):
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 21)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (8, 7))
    tokens, factors = torch.randint(7, (8,)), torch.randn(8, dtype=torch.float64)
    found = per_token_from_hidden(hidden, weight, tokens, temperature=0.7, entropy=True)
    logits = hidden @ weight.T
    expected = (
        logprobs_from_logits(logits, tokens, temperature=0.7),
        entropy_from_logits(logits, temperature=0.7),
    )
    gradients = [
        torch.autograd.grad((factors * values[used]).sum(), (hidden, weight))
        for values in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no count of the peak")
def test_a_vocabulary_of_150_thousand_is_never_held_for_all_tokens():
    command = [sys.executable, "-c", CHILD]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed is given back at once
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < WHOLE_MIB / 3  # all at once takes six times it


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}])
def test_an_engine_samples_the_same_tokens_with_logits_in_pieces(cut, monkeypatch):
    def sampled():
        sampling = SamplingParams(max_new_tokens=6, **cut)
        prompts = enumerate(make_prompts(5))
        requests = [Request(ids, [2 * i, 2 * i + 1], sampling) for i, ids in prompts]
        return TorchEngine(make_model(), seed=3).generate(requests)

    whole = sampled()
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", 50)  # two rows of 23
    for one, other in zip(whole, sampled(), strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        torch.testing.assert_close(one.logprobs, other.logprobs)
