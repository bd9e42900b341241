"""Weights that arrive while rows run, and rows that have become too old."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import FAMILIES, as_batch, make_model
from small_requests import generate, make_engine, make_requests, run_tokens, tokens

import rlkit as rk
from rlkit.engines import Request, too_old
from rlkit.engines.sampling import noise, sample

OLD, NEW = make_model(seed=1, max_positions=160), make_model(seed=2, max_positions=160)


def start(requests, model=OLD, *, steps=0, **changes):
    """An engine that has sampled so many tokens of each request."""
    engine = make_engine(model, **changes)
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        engine.step()
    return engine


def finish(engine):
    """The responses of all that runs, by uid."""
    found = []
    while engine.waiting or engine.rows:
        found += engine.step()
    return sorted(found, key=lambda response: response.uid)


def sampled_by_hand(model, request, uid, written, num):
    """``num`` more tokens after ``written``, the whole sequence computed anew for each of them."""
    draws = noise(0, np.asarray([uid]), len(written) + num)[0]
    backend, written = rk.TorchBackend(model), list(written)
    for at in range(len(written), len(written) + num):
        tries = [torch.tensor([*written, token]) for token in range(model.spec.vocab_size)]
        batch = rk.Batch.from_columns(
            {
                "prompt_ids": [torch.tensor(list(request.prompt_ids))] * len(tries),
                "response_ids": tries,
                "temperature": [request.sampling.temperature] * len(tries),
            }
        )
        logits = backend.forward(batch)[0].padded()[:, -1][None]  # [1, V] of every next token
        uniform = torch.tensor([draws[at]], dtype=torch.float64)
        written.append(int(sample(logits, torch.ones(1), uniform)[0]))
    return written


@pytest.mark.parametrize("recompute", [True, False])
def test_a_response_of_128_tokens_interrupted_at_57_says_which_weights_sampled_what(
    recompute,
):  # F6
    engine = start([Request([3, 4, 5], [9], rk.SamplingParams(max_new_tokens=128))])
    engine.load_weights(OLD.weights, version=7)
    for _ in range(57):
        assert not engine.step()
    engine.load_weights(NEW.weights, version=8, recompute=recompute)
    (response,) = finish(engine)
    assert response.token_version.tolist() == [7] * 57 + [8] * 71
    (old,) = generate([Request([3, 4, 5], [9], rk.SamplingParams(max_new_tokens=128))], model=OLD)
    assert torch.equal(response.token_ids[:57], old.token_ids[:57])
    assert torch.equal(response.logprobs[:57], old.logprobs[:57])


@pytest.mark.parametrize("family", ["llama", "llama with grouped queries", "qwen3"])
def test_after_new_weights_a_row_goes_on_as_if_they_had_read_all_of_it(family):
    old, new = (make_model(seed=seed, **FAMILIES[family]) for seed in (1, 2))
    requests = make_requests(5, n=2, max_new_tokens=12)
    engine = start(requests, old, steps=7)
    engine.load_weights(new.weights, version=1)
    for response in finish(engine):
        ids = response.token_ids.tolist()
        request = requests[response.uid // 2]
        assert ids == sampled_by_hand(new, request, response.uid, ids[:7], 5)


def test_logprobs_after_new_weights_are_the_new_trainers():
    requests = make_requests(6, n=2, max_new_tokens=12, temperature=0.7)
    engine = start(requests, steps=5)
    engine.load_weights(NEW.weights, version=1)
    batch = as_batch(requests, finish(engine))
    before, after = (rk.TorchBackend(m).forward(batch)[0].padded() for m in (OLD, NEW))
    expected = torch.cat((before[:, :5], after[:, 5:]), 1)
    torch.testing.assert_close(batch["rollout_logprobs"], expected, atol=1e-4, rtol=0)


def test_with_the_cache_kept_a_row_still_attends_to_the_old_keys():
    requests, found = make_requests(4, n=2, max_new_tokens=20), {}
    for recompute in (True, False):
        engine = start(requests, steps=6)
        engine.load_weights(NEW.weights, version=1, recompute=recompute)
        if not recompute:
            assert run_tokens(engine, engine.step) == 8  # nothing but the next tokens
        found[recompute] = [r.logprobs[7].item() for r in finish(engine)]
    assert not np.allclose(found[True], found[False], atol=1e-3)


def test_the_same_weights_again_change_nothing():
    requests = make_requests(7, n=2, max_new_tokens=12, stop=[5])
    engine = start(requests, steps=4)
    engine.load_weights(OLD.weights, version=1)
    later = finish(engine)
    expected = {r.uid: r.token_ids.tolist() for r in generate(requests, model=OLD)}
    assert {r.uid: r.token_ids.tolist() for r in later}.items() <= expected.items()


@settings(max_examples=15)
@given(st.sets(st.integers(1, 9), max_size=3), st.integers(1, 5))
def test_rows_do_not_depend_on_what_runs_beside_them_when_weights_change(swaps, num):
    """New weights come at the same token of each row."""
    requests, found = make_requests(num, max_new_tokens=10), []

    def run(engine):
        for step in range(10):
            if step in swaps:
                weights = (OLD, NEW)[engine.version % 2].weights
                engine.load_weights(weights, version=engine.version + 1)
            yield from engine.step()

    for request in requests:
        found += run(start([request]))
    together = [*run(start(requests))]
    assert tokens(together) == tokens(found)
    for response in together:
        versions = [sum(swap <= at for swap in swaps) for at in range(10)]
        assert response.token_version.tolist() == versions


def test_a_continued_row_has_every_column_once():  # faults C10
    engine = start(make_requests(1, max_new_tokens=5), steps=3)
    engine.load_weights(NEW.weights, version=1)
    (response,) = finish(engine)
    columns = (response.token_ids, response.logprobs, response.token_version)
    assert [len(column) for column in columns] == [5, 5, 5]


def test_a_response_that_came_before_the_weights_keeps_its_version():  # faults F6
    engine = start([], model=OLD)
    engine.load_weights(OLD.weights, version=7)
    responses = engine.generate(make_requests(2))
    engine.load_weights(NEW.weights, version=8)
    assert {v for r in responses for v in r.token_version.tolist()} == {7}


def test_requests_that_begin_after_new_weights_are_sampled_by_them_alone():
    waiting = make_requests(3, max_new_tokens=6, first_uid=50)
    engine = start(make_requests(3, max_new_tokens=6) + waiting, steps=2, max_rows=3)
    engine.load_weights(NEW.weights, version=1)
    later = [r for r in finish(engine) if r.uid >= 50]
    assert tokens(later) == tokens(generate(waiting, model=NEW))
    assert {v for r in later for v in r.token_version.tolist()} == {1}


def test_only_running_rows_are_computed_again_and_once():
    engine = start([Request([3, 4, 5], [1, 2], rk.SamplingParams(max_new_tokens=9))], steps=4)
    engine.load_weights(NEW.weights, version=1)
    engine.load_weights(OLD.weights, version=2)
    assert run_tokens(engine, engine.step) == 2 * (3 + 3) + 2  # prompt and 3 of 4 tokens, then one
    assert run_tokens(engine, engine.step) == 2


def test_rows_are_computed_again_in_parts_that_fit(monkeypatch):
    requests = make_requests(9, max_new_tokens=8)
    whole, parts = start(requests, steps=4), start(requests, steps=4)
    whole.load_weights(NEW.weights, version=1)
    expected = tokens(finish(whole))
    monkeypatch.setattr("rlkit.engines.torch_engine.RECOMPUTED_TOKENS", 20)
    parts.load_weights(NEW.weights, version=1)
    assert tokens(finish(parts)) == expected


def test_weights_may_come_while_the_engine_is_paused():
    requests = make_requests(3, max_new_tokens=6)
    engine = start(requests, steps=2)
    engine.pause()
    engine.load_weights(NEW.weights, version=1)
    assert run_tokens(engine, engine.step) == 0
    engine.resume()
    assert {tuple(r.token_version.tolist()) for r in finish(engine)} == {(0, 0, 1, 1, 1, 1)}


def test_weights_that_do_not_fit_leave_running_rows_as_they_were():
    requests = make_requests(3, max_new_tokens=6)
    engine = start(requests, steps=2)
    with pytest.raises(ValueError, match="got shape"):
        engine.load_weights(make_model(hidden_size=18).weights, version=1)
    assert run_tokens(engine, engine.step) == 3
    assert tokens(finish(engine)) == tokens(generate(requests, model=OLD))


def test_weights_stay_where_they_are_in_memory():  # faults G7
    engine = make_engine(OLD)
    places = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    for version in range(3):
        engine.load_weights(NEW.weights, version=version)
    assert {name: tensor.data_ptr() for name, tensor in engine.weights().items()} == places
    for name, tensor in engine.weights().items():
        assert torch.equal(tensor, NEW.weights[name])


# ---- rows that have become too old ----


def test_rows_older_than_the_maximum_age_are_named():
    assert too_old({1: 3, 2: 5, 3: 4}, version=6, max_age=2) == [1]


@given(st.dictionaries(st.integers(), st.integers(0, 9)), st.integers(9, 20), st.integers(0, 20))
def test_no_row_is_too_old_that_is_within_the_age(first, version, max_age):
    old = set(too_old(first, version=version, max_age=max_age))
    assert all((version - first[uid] > max_age) == (uid in old) for uid in first)


def test_an_engine_without_rows_has_none_that_are_old():
    assert make_engine(OLD).first_versions() == {}


def test_a_row_that_became_too_old_is_started_again_by_the_new_weights():
    request = make_requests(1, max_new_tokens=10)[0]
    engine = start([request], steps=3)
    engine.load_weights(NEW.weights, version=2)
    engine.step()
    assert engine.first_versions() == {0: 0}
    old = too_old(engine.first_versions(), version=engine.version, max_age=1)
    (ended,) = engine.abort(old)
    assert ended.token_version.tolist() == [0, 0, 0, 2]
    engine.add(request)
    assert tokens(finish(engine)) == tokens(generate([request], model=NEW))
