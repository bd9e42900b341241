"""Requests that come and go while others run: callbacks and abort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import as_batch, make_model
from small_requests import generate, make_engine, make_requests, tokens

import rlkit as rk
from rlkit.engines import Request

MODEL = make_model()


def drain(engine):
    found = []
    while engine.waiting or engine.rows:
        found += engine.step()
    return found


# ---- any order ----


@settings(max_examples=15)
@given(st.lists(st.sampled_from("asx"), max_size=30), st.integers(2, 9), st.randoms())
def test_any_order_of_add_step_and_abort_samples_what_each_request_would_alone(moves, rows, random):
    engine, requests = make_engine(MODEL, max_rows=rows), make_requests(10, n=2, stop=range(6))
    left, finished, stopped = [*requests], [], []
    for move in moves:
        if move == "a" and left:
            engine.add(left.pop())
        elif move == "s":
            finished += engine.step()
        elif move == "x" and engine.uids:
            stopped += engine.abort([random.choice(sorted(engine.uids))])
    finished += drain(engine)
    alone = tokens(generate(requests, model=MODEL))
    assert tokens(finished).items() <= alone.items()
    for response in stopped:
        ids = response.token_ids.tolist()
        assert response.finish_reason == "abort"
        assert ids == alone[response.uid][: len(ids)]
    assert not engine.uids
    assert not engine.rows


# ---- callbacks ----


def test_callbacks_get_every_response_as_it_ends_and_every_token_before():
    seen, responses = {}, []

    def on_token(uid, token, logprob):
        seen.setdefault(uid, []).append((token, logprob))

    def on_response(response):
        pairs = zip(response.token_ids.tolist(), response.logprobs.tolist(), strict=True)
        assert seen[response.uid] == [*pairs]
        responses.append(response)

    requests = make_requests(7, n=2, stop=range(8))
    engine = make_engine(MODEL, max_rows=5)
    result = engine.generate(requests, on_response=on_response, on_token=on_token)
    assert tokens(responses) == tokens(result) == tokens(generate(requests, model=MODEL))
    assert [r.uid for r in responses] != [r.uid for r in result]


def test_an_error_of_a_callback_leaves_nothing_running():
    engine = make_engine(MODEL)
    with pytest.raises(ZeroDivisionError):
        engine.generate(make_requests(3), on_response=lambda response: 1 / 0)
    assert not engine.rows
    assert not engine.uids


def test_a_callback_may_abort_the_rest():
    engine, stopped = make_engine(MODEL), []
    requests = make_requests(4, n=2, stop=range(8))
    found = engine.generate(requests, on_response=lambda response: stopped.extend(engine.abort()))
    assert len(found) + len(stopped) == 8
    assert found
    assert tokens(found).items() <= tokens(generate(requests, model=MODEL)).items()


# ---- abort ----


def test_abort_of_some_leaves_the_others_as_they_were():
    engine, requests = make_engine(MODEL), make_requests(4, n=2)
    for request in requests:
        engine.add(request)
    engine.step()
    stopped = engine.abort([0, 3, 5, 99])
    assert sorted(r.uid for r in stopped) == [0, 3, 5]
    alone = tokens(generate(requests, model=MODEL))
    assert tokens(drain(engine)) == {uid: alone[uid] for uid in (1, 2, 4, 6, 7)}


def test_abort_of_a_waiting_uid_takes_it_out_of_its_group():
    engine, requests = make_engine(MODEL, max_rows=2), make_requests(3, n=2)
    for request in requests:
        engine.add(request)
    engine.step()
    assert engine.abort([2, 4, 5]) == []
    assert sorted(r.uid for r in drain(engine)) == [0, 1, 3]


def test_an_aborted_uid_may_come_again():
    engine, requests = make_engine(MODEL), make_requests(1)
    engine.add(requests[0])
    engine.step()
    engine.abort()
    assert tokens(engine.generate(requests)) == tokens(generate(requests, model=MODEL))


def test_a_uid_that_waits_is_not_taken_again():
    engine = make_engine(MODEL)
    engine.add(Request([3], [1]))
    with pytest.raises(ValueError, match="uids: got 1 more than once"):
        engine.add(Request([3], [1]))


# ---- cut sampling ----


def test_responses_record_how_they_were_sampled_and_logprobs_are_the_trainers():
    sampling = rk.SamplingParams(temperature=0.8, top_k=4, top_p=0.9, min_p=0.02)
    requests = [Request([3, 4, 5], range(8), sampling)]
    responses = generate(requests, model=MODEL)
    assert {r.sampling for r in responses} == {sampling}
    batch = as_batch(requests, responses)
    trainer, _ = rk.TorchBackend(MODEL).forward(batch)
    torch.testing.assert_close(trainer.padded(), batch["rollout_logprobs"], atol=1e-4, rtol=0)


def test_the_most_likely_token_alone_is_greedy():
    requests = [
        Request([3, 4, 5], [uid], rk.SamplingParams(**how))
        for uid, how in enumerate(
            [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}]
        )
    ]
    assert len({tuple(r.token_ids.tolist()) for r in generate(requests, model=MODEL)}) == 1
