"""Requests that come and go while others run: callbacks, abort, groups pulled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import as_batch, make_model
from small_requests import generate, make_engine, make_requests, tokens

import rlkit as rk
from rlkit.engines import Request, serve

MODEL = make_model()


def pull_from(requests):
    """The next of the requests, None after the last."""
    left = iter(requests)
    return lambda: next(left, None)


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
    assert engine.num_free == rows


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


# ---- groups ----


@settings(max_examples=15)
@given(st.lists(st.integers(1, 4), max_size=8), st.integers(4, 9))
def test_served_groups_come_whole_each_once(sizes, max_rows):
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    how = rk.SamplingParams(stop_token_ids=tuple(range(8)))
    requests = [
        Request([3 + i], range(first, first + size), how)
        for i, (first, size) in enumerate(zip(firsts, sizes, strict=True))
    ]
    served = list(serve(make_engine(MODEL, max_rows=max_rows), pull_from(requests)))
    for request, responses in served:
        assert [r.uid for r in responses] == [*request.uids]
    assert sorted(request.uids[0] for request, _ in served) == firsts
    together = {uid: ids for _, responses in served for uid, ids in tokens(responses).items()}
    assert together == tokens(generate(requests, model=MODEL))


def test_a_group_is_given_as_soon_as_its_last_response_ends():
    short, long = (
        Request([3], [uid], rk.SamplingParams(max_new_tokens=num)) for uid, num in ((0, 20), (1, 3))
    )
    served = [request.uids for request, _ in serve(make_engine(MODEL), pull_from([short, long]))]
    assert served == [[1], [0]]


def test_slots_are_filled_and_no_more_than_one_group_waits():
    requests, most = make_requests(12, n=2, stop=range(8)), []
    engine = make_engine(MODEL, max_rows=5)
    for _ in serve(engine, pull_from(requests)):
        most.append((len(engine.rows), len(engine.waiting)))
    assert max(rows for rows, _ in most) >= 4
    assert max(waiting for _, waiting in most) <= 1


def test_two_engines_share_groups_by_how_fast_they_are():
    requests = make_requests(20, max_new_tokens=6)
    pull, given = pull_from(requests), {"quick": [], "slow": []}
    engines = {"quick": make_engine(MODEL, max_rows=4), "slow": make_engine(MODEL, max_rows=1)}
    running = {name: serve(engine, pull) for name, engine in engines.items()}
    while running:
        for name in [*running]:
            item = next(running[name], None)
            if item is None:
                del running[name]
            else:
                given[name] += item[1]
    assert len(given["quick"]) + len(given["slow"]) == 20
    assert tokens(given["quick"] + given["slow"]) == tokens(generate(requests, model=MODEL))


def test_no_group_for_now_is_asked_for_again():
    answers = [make_requests(1, max_new_tokens=4)[0], None, make_requests(1, first_uid=7)[0]]
    served = list(serve(make_engine(MODEL), lambda: answers.pop(0) if answers else None))
    assert [request.uids[0] for request, _ in served] == [0, 7]


def test_leaving_early_aborts_what_was_begun():
    engine = make_engine(MODEL)
    engine.add(Request([3], [100], rk.SamplingParams(max_new_tokens=30)))
    groups = serve(engine, pull_from(make_requests(3, n=2, stop=range(12))))
    next(groups)
    groups.close()
    assert engine.uids == {100}


def test_a_group_with_an_aborted_row_is_not_given():
    engine = make_engine(MODEL)
    groups = serve(
        engine,
        pull_from([*make_requests(1, max_new_tokens=2), *make_requests(2, n=2, first_uid=10)]),
    )
    next(groups)
    engine.abort([10])
    assert [request.uids[0] for request, _ in groups] == [12]


def test_serving_a_paused_engine_is_an_error_not_a_wait():
    engine = make_engine(MODEL)
    requests = make_requests(1, max_new_tokens=2) + make_requests(1, first_uid=1)
    groups = serve(engine, pull_from(requests))
    next(groups)
    engine.pause()
    with pytest.raises(RuntimeError, match=r"call resume\(\)"):
        list(groups)
