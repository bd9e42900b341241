"""Tied embeddings in vLLM; a module of its own, for a process has one engine at a time."""

import pytest
from small_models import make_model
from vllm_models import SHAPE, assert_logprobs_are_those_of

import rlkit as rk
from rlkit.engines import Request

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_start_that_failed_is_not_in_the_way_of_the_next_one():
    model = make_model(1, tie_embeddings=True, **SHAPE)
    with pytest.raises(TypeError, match="nonsense") as caught:  # it holds the frame, and the engine
        rk.VLLMEngine(model, nonsense=1)
    rk.VLLMEngine(model, max_rows=8).close()
    assert caught


def test_tied_embeddings_are_replaced_at_both_ends():  # G1
    """vllm #5621, #51665."""
    model = make_model(1, tie_embeddings=True, **SHAPE)
    engine = rk.VLLMEngine(model, max_rows=8)
    changed = {name: tensor.clone() for name, tensor in model.weights.items()}
    changed["model.embed_tokens.weight"][3] += 1
    engine.load_weights(changed, version=1)
    requests = [Request([3, 4, 3], [0, 1], rk.SamplingParams(max_new_tokens=30))]
    after = rk.models.Pretrained(model.spec, model.tokenizer, changed)
    assert_logprobs_are_those_of(after, requests, engine.generate(requests))
