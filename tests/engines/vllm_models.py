"""A shape that vLLM for CPU runs, and the trainer's logprobs beside its own."""

import torch
from small_models import as_batch

import rlkit as rk

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention on CPU has
    "max_positions": 256,
}


def trained(model, requests, responses):
    """The trainer's logprobs of what was sampled, by row."""
    rows, _ = rk.TorchBackend(model).forward(as_batch(requests, responses))
    return rows.unpack()


def assert_logprobs_are_those_of(model, requests, responses):
    for response, expected in zip(responses, trained(model, requests, responses), strict=True):
        torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=0)
