"""Stop strings and stop tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make_model
from small_requests import generate, make_engine

import rlkit as rk
from rlkit.engines import Request
from rlkit.engines.stops import GrowingText
from rlkit.models.tokenizer import Tokenizer

MODEL = make_model()


def sampled(stop=(), *, uids=range(6), stop_token_ids=(), max_new_tokens=24):
    """Responses of one prompt to several uids."""
    sampling = rk.SamplingParams(
        max_new_tokens=max_new_tokens, stop=tuple(stop), stop_token_ids=tuple(stop_token_ids)
    )
    return generate([Request([3, 4, 5], uids, sampling)], model=MODEL)


def byte_tokenizer():
    """Tokens of one byte each, and two longer ones."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab", "cd"])}
    inner = Inner(models.BPE(vocab, [("a", "b"), ("c", "d")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner.to_str(), eos_id=0, pad_id=0)


def grown(tokenizer, ids, *stop):
    """The text after ids, up to the one that completes a stop string, and how many those are."""
    text = GrowingText(tokenizer, stop)
    num = next((i for i, token in enumerate(ids, 1) if text.push(token)), None)
    return text, num


def test_a_stop_string_over_two_tokens_ends_the_response_and_its_tokens_stay():
    free = sampled()[0]
    text = MODEL.tokenizer.decode(free.token_ids.tolist()[4:7])
    response = sampled([text])[0]
    assert response.finish_reason == "stop"
    assert response.stop_reason == text
    ids = response.token_ids.tolist()
    assert ids == free.token_ids.tolist()[: len(ids)]
    assert MODEL.tokenizer.decode(ids) == response.text + text
    assert len(response.logprobs) == len(response.token_version) == len(ids)


@settings(max_examples=20)
@given(st.lists(st.text("0123456789+-*=()> ,?", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_response_ends_with_the_first_token_that_completes_a_stop_string(stop):
    decode = MODEL.tokenizer.decode
    for free, response in zip(sampled(), sampled(stop), strict=True):
        ids = free.token_ids.tolist()
        ends = [n for n in range(1, 25) if any(s in decode(ids[:n]) for s in stop)]
        length = min(ends, default=24)
        assert response.token_ids.tolist() == ids[:length]
        torch.testing.assert_close(response.logprobs, free.logprobs[:length])
        whole, found = decode(ids[:length]), response.stop_reason
        if ends:
            assert response.finish_reason == "stop"
            assert whole.find(found) == min(whole.find(s) for s in stop if s in whole)
            assert response.text == whole[: whole.find(found)]
        else:
            assert (response.finish_reason, found, response.text) == ("length", None, whole)


def test_a_stop_token_is_named_and_comes_before_a_stop_string():
    token = sampled()[0].token_ids.tolist()[5]
    text = MODEL.tokenizer.decode([token])
    assert sampled(stop_token_ids=[token])[0].stop_reason == token
    both = sampled([text], stop_token_ids=[token])[0]
    assert (both.finish_reason, both.stop_reason) == ("stop", token)


def test_a_response_without_stop_strings_has_no_text():
    assert {(r.text, r.stop_reason) for r in sampled()} == {(None, None)}


def test_rows_with_stop_strings_run_beside_rows_without():
    plain, stopping = rk.SamplingParams(), rk.SamplingParams(stop=("1", "2", "3"))
    requests = [Request([3, 4], range(4), plain), Request([3, 4], range(4, 8), stopping)]
    together = generate(requests, model=MODEL)
    alone = generate(requests[:1], model=MODEL) + generate(requests[1:], model=MODEL)
    assert [r.token_ids.tolist() for r in together] == [r.token_ids.tolist() for r in alone]
    assert min(len(r.token_ids) for r in together[4:]) < 32


def test_an_aborted_response_has_its_text_so_far():
    engine = make_engine(MODEL)
    engine.add(Request([3, 4], [0], rk.SamplingParams(stop=("never",))))
    engine.step()
    engine.step()
    (response,) = engine.abort()
    assert response.text == MODEL.tokenizer.decode(response.token_ids.tolist())


@pytest.mark.parametrize("text", ["xxabcdyy", "naïve – 日本 🙂!"])
def test_text_grows_to_what_the_tokenizer_decodes(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    growing, _ = grown(tokenizer, ids, "never")
    assert growing.text == tokenizer.decode(ids) == text


def test_a_stop_string_inside_a_token_cuts_the_text_there():
    tokenizer = byte_tokenizer()
    growing, num = grown(tokenizer, tokenizer.encode("xabcdx"), "bc")  # tokens x, ab, cd, x
    assert (growing.text, growing.found, num) == ("xa", "bc", 3)


def test_a_stop_string_of_several_bytes_waits_for_all_of_them():
    tokenizer = byte_tokenizer()
    growing, num = grown(tokenizer, tokenizer.encode("x🙂x"), "🙂")
    assert (growing.text, num) == ("x", 5)


def test_of_two_stop_strings_the_first_in_the_text_is_named():
    tokenizer = byte_tokenizer()
    growing, _ = grown(tokenizer, tokenizer.encode("xcd"), "d", "cd")
    assert (growing.text, growing.found) == ("x", "cd")


@pytest.mark.parametrize("stop", ["ab", ("",), ("a", "")])
def test_stop_strings_that_mean_nothing_are_an_error(stop):
    with pytest.raises(ValueError, match="stop: got"):
        rk.SamplingParams(stop=stop)
