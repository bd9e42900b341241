"""TorchEngine: tokens of transformers, logprobs of the trainer, whatever runs beside a row."""

import pytest
import torch
import transformers
from small_models import FAMILIES, as_batch, make_model
from small_requests import generate, make_engine, make_requests, run_tokens, tokens

import rlkit as rk
from rlkit.engines import Request

EOS = 2


# ---- numbers agree ----


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    model = make_model(**FAMILIES[family])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model.save(tmp_path))
    requests = make_requests(10, max_new_tokens=12, temperature=0.0, stop=[EOS, 7])
    responses = make_engine(model, max_rows=6).generate(requests)
    for request, response in zip(requests, responses, strict=True):
        ids = torch.tensor([request.prompt_ids])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=[EOS, 7],
            pad_token_id=0,
        )
        assert response.token_ids.tolist() == out[0, len(request.prompt_ids) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])  # faults C4
@pytest.mark.parametrize("family", ["llama with grouped queries", "qwen2", "qwen3"])
def test_logprobs_are_the_trainers(family, temperature):
    model = make_model(**FAMILIES[family])
    requests = make_requests(7, n=2, temperature=temperature, stop=[EOS])
    batch = as_batch(requests, make_engine(model, max_rows=5).generate(requests))
    trainer, _ = rk.TorchBackend(model).forward(batch)
    torch.testing.assert_close(trainer.padded(), batch["rollout_logprobs"], atol=1e-4, rtol=0)


def test_logprobs_of_another_temperature_are_not_the_trainers():  # faults C4
    requests = make_requests(3, temperature=0.6)
    batch = as_batch(requests, generate(requests))
    batch["temperature"] = torch.ones(3)
    trainer, _ = rk.TorchBackend(make_model()).forward(batch)
    assert (trainer.padded() - batch["rollout_logprobs"]).abs().max() > 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_frequencies_are_the_softmax(temperature):
    model, num = make_model(), 4000
    sampling = rk.SamplingParams(temperature=temperature, max_new_tokens=1)
    engine = make_engine(model, max_rows=num, max_len=4)
    responses = engine.generate([Request([3, 4, 5], range(num), sampling)])
    counts = torch.bincount(torch.cat([r.token_ids for r in responses]), minlength=23)
    every = rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([3, 4, 5])] * 23,
            "response_ids": torch.arange(23)[:, None],
            "temperature": [temperature] * 23,
        }
    )
    expected = rk.TorchBackend(model).forward(every)[0].values.exp() * num  # [V]
    many = expected > 5
    num_bins = int(many.sum())
    assert num_bins > 3
    chi_square = ((counts - expected) ** 2 / expected)[many].sum()
    assert chi_square < num_bins + 4 * (2 * num_bins) ** 0.5  # mean and deviation of the sum


def test_a_model_in_bfloat16_gives_float32_logprobs():
    (response,) = generate(make_requests(1), dtype=torch.bfloat16)
    assert response.logprobs.dtype == torch.float32


# ---- a row does not depend on what runs beside it ----


@pytest.mark.parametrize("max_rows", [2, 4, 64])
def test_tokens_do_not_depend_on_the_number_of_slots(max_rows):
    requests = make_requests(12, n=2, stop=range(12))
    alone = {}
    for request in requests:
        alone |= tokens(generate([request]))
    assert len({len(row) for row in alone.values()}) > 3  # rows end at different times
    assert tokens(generate(requests, max_rows=max_rows)) == alone


def test_tokens_do_not_depend_on_the_order_of_requests():
    requests = make_requests(9, n=2, stop=range(8))
    forward = generate(requests, max_rows=5)
    assert tokens(generate(requests[::-1], max_rows=5)) == tokens(forward)


def test_responses_come_in_the_order_of_the_requests():
    requests = make_requests(5, n=2, stop=range(10))
    uids = [r.uid for r in generate(requests[::-1], max_rows=3)]
    assert uids == [8, 9, 6, 7, 4, 5, 2, 3, 0, 1]


def test_greedy_and_sampled_rows_run_together():
    greedy, sampled = make_requests(3, temperature=0.0), make_requests(3, first_uid=10)
    together = tokens(generate(greedy + sampled))
    assert together == tokens(generate(greedy)) | tokens(generate(sampled))


def test_two_uids_of_one_prompt_get_different_responses_and_again_the_same():  # faults D6
    requests = [
        Request([3, 4], [5], rk.SamplingParams()),
        Request([3, 4], [6], rk.SamplingParams()),
    ]
    first, second = generate(requests)
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert tokens(generate(requests)) == tokens([first, second])


def test_another_seed_samples_otherwise():
    requests = make_requests(1, n=4)
    assert tokens(generate(requests, seed=0)) != tokens(generate(requests, seed=1))


def test_two_replicas_differ_by_uid_alone():  # faults D6
    one, two = make_engine(), make_engine()
    requests, others = make_requests(3, n=2), make_requests(3, n=2, first_uid=6)
    apart = tokens(one.generate(requests)) | tokens(two.generate(others))
    assert apart == tokens(generate(requests + others))


# ---- work done ----


def test_the_prompt_of_a_group_runs_once():
    engine = make_engine()
    (request,) = make_requests(1, n=5, max_new_tokens=4)
    request = Request([3, 4, 5, 6, 7, 8], request.uids, request.sampling)
    assert run_tokens(engine, lambda: engine.generate([request])) == 6 + 5 * 3


def test_rows_that_ended_cost_nothing_more():
    engine, requests = make_engine(), make_requests(8, max_new_tokens=16, stop=range(12))
    responses = []
    spent = run_tokens(engine, lambda: responses.extend(engine.generate(requests)))
    prompts = sum(len(request.prompt_ids) for request in requests)
    assert spent == prompts + sum(len(r.token_ids) - 1 for r in responses)


def test_free_slots_are_refilled_at_once():
    engine, requests = make_engine(max_rows=4), make_requests(12, stop=range(12))
    for request in requests:
        engine.add(request)
    while engine.waiting:
        ended = len(engine.step())
        assert len(engine.rows) == 4 - ended
    assert engine.rows


def test_a_group_larger_than_the_free_slots_waits_for_them():
    engine = make_engine(max_rows=4)
    responses = engine.generate(make_requests(3, n=3))
    assert len(responses) == 9


def test_stepping_by_hand_gives_what_generate_gives():
    requests, engine, found = make_requests(6, n=2, stop=range(8)), make_engine(max_rows=5), []
    for request in requests:
        engine.add(request)
    while engine.waiting or engine.rows:
        found += engine.step()
    assert tokens(found) == tokens(generate(requests))


def test_a_step_without_work_returns_nothing():
    assert make_engine().step() == []


# ---- how a response ends ----


def test_a_stop_token_ends_the_response_and_belongs_to_it():
    for response in generate(make_requests(8, n=2, stop=range(10))):
        *before, last = response.token_ids.tolist()
        assert all(token >= 10 for token in before)
        assert response.finish_reason == ("stop" if last < 10 else "length")


def test_a_response_without_stop_token_has_the_length_asked_for():
    for response in generate(make_requests(4, max_new_tokens=5)):
        assert len(response.token_ids) == len(response.logprobs) == 5
        assert response.finish_reason == "length"


def test_a_stop_token_in_the_last_place_is_a_stop():
    request = make_requests(1, max_new_tokens=1, stop=range(23))
    assert [r.finish_reason for r in generate(request)] == ["stop"]


def test_pad_equal_to_eos_changes_nothing():  # faults C3
    requests = make_requests(6, n=2, stop=[EOS])
    model = make_model()
    expected = tokens(make_engine(model).generate(requests))
    model.tokenizer.pad_id = EOS
    assert tokens(make_engine(model).generate(requests)) == expected


def test_the_padding_token_is_a_token_like_any_other_when_sampled():  # faults C3
    model = make_model()
    model.weights["lm_head.weight"][1:] = 0  # tokens 1.. have logit 0, token 0 (pad) its own
    model.weights["lm_head.weight"][0] *= 0
    uniform = rk.SamplingParams(max_new_tokens=40, stop_token_ids=(EOS,))
    responses = make_engine(model).generate([Request([3], range(20), uniform)])
    inner = [token for r in responses for token in r.token_ids.tolist()[:-1]]
    assert 0 in inner
    assert EOS not in inner


def test_responses_can_enter_a_gradient():
    (response,) = generate(make_requests(1))
    weight = torch.ones(8, requires_grad=True)
    (weight * response.logprobs).sum().backward()
    assert torch.equal(weight.grad, response.logprobs)


# ---- weights ----


def test_tokens_carry_the_version_of_the_weights():
    engine = make_engine()
    engine.load_weights(make_model(seed=2).weights, version=3)
    (response,) = engine.generate(make_requests(1))
    assert response.token_version.tolist() == [3] * 8


def test_tokens_of_a_new_engine_carry_version_0():
    assert generate(make_requests(1))[0].token_version.tolist() == [0] * 8


def test_new_weights_generate_as_a_cold_engine_with_them():  # faults G6
    requests, new = make_requests(5, n=2), make_model(seed=2)
    engine = make_engine(make_model(seed=1))
    old = tokens(engine.generate(requests))
    engine.load_weights(new.weights, version=1)
    warm, cold = engine.generate(requests), make_engine(new).generate(requests)
    assert tokens(warm) == tokens(cold) != old
    assert all(torch.equal(a.logprobs, b.logprobs) for a, b in zip(warm, cold, strict=True))


def test_tied_weights_change_both_embeddings():  # faults G1
    model = make_model(tie_embeddings=True)
    engine = make_engine(model)
    model.weights["model.embed_tokens.weight"][3] += 1
    engine.load_weights(model.weights, version=1)
    requests = make_requests(4)
    assert tokens(engine.generate(requests)) == tokens(make_engine(model).generate(requests))


def test_weights_that_do_not_fit_leave_weights_and_version():
    engine, requests = make_engine(), make_requests(3)
    before = tokens(engine.generate(requests))
    with pytest.raises(ValueError, match="got shape"):
        engine.load_weights(make_model(hidden_size=18, seed=2).weights, version=1)
    assert engine.version == 0
    assert tokens(engine.generate(requests)) == before


# ---- pause, sleep, abort ----


def test_a_paused_engine_does_nothing_and_goes_on_where_it_was():
    engine, requests, found = make_engine(), make_requests(3), []
    for request in requests:
        engine.add(request)
    engine.step()
    engine.pause()
    assert run_tokens(engine, engine.step) == 0
    engine.resume()
    while engine.rows:
        found += engine.step()
    assert tokens(found) == tokens(generate(requests))


def test_generate_on_a_paused_engine_is_an_error_and_queues_nothing():
    engine = make_engine()
    engine.pause()
    with pytest.raises(RuntimeError, match=r"call resume\(\)"):
        engine.generate(make_requests(1))
    assert not engine.waiting


def test_the_cache_is_as_large_as_the_requests_need():
    engine = make_engine(make_model(max_positions=1 << 20), max_rows=1 << 20)
    engine.generate([Request([3, 4, 5], range(2), rk.SamplingParams(max_new_tokens=5))])
    assert (engine.cache.num_slots, engine.cache.max_len) == (2, 8)
    engine.generate([Request([3, 4, 5], range(3), rk.SamplingParams(max_new_tokens=6))])
    assert (engine.cache.num_slots, engine.cache.max_len) == (4, 16)


def test_the_cache_grows_up_to_the_limits():
    engine = make_engine(max_rows=3, max_len=10)
    for num in (2, 3):
        sampling = rk.SamplingParams(max_new_tokens=3 * num - 1)
        engine.generate([Request([3, 4], range(num), sampling)])
    assert (engine.cache.num_slots, engine.cache.max_len) == (3, 10)


def test_rows_that_run_while_the_cache_grows_go_on_unchanged():
    requests = make_requests(9, n=2, max_new_tokens=4)
    requests += make_requests(9, n=3, max_new_tokens=20, first_uid=100)
    expected, engine, found = tokens(generate(requests)), make_engine(), []
    for request in requests:
        engine.add(request)
        found += engine.step()
    while engine.rows:
        found += engine.step()
    assert tokens(found) == expected


@pytest.mark.parametrize("groups", [([1, 1],), ([1], [2, 1]), ([1, 2], [3, 4], [4])])
def test_a_uid_twice_in_a_call_is_an_error(groups):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"uids: got [14] more than once \(1 such\)"):
        engine.generate([Request([3, 4], uids) for uids in groups])
    assert engine.generate([Request([3, 4], [1])])[0].uid == 1


def test_a_uid_that_is_queued_or_running_is_not_taken_again():
    engine = make_engine()
    engine.add(Request([3, 4], [1]))
    with pytest.raises(ValueError, match="uids: got 1 more than once"):
        engine.generate([Request([3, 4], [1])])
    engine.step()
    with pytest.raises(ValueError, match="uids: got 1 more than once"):
        engine.add(Request([3, 4], [1]))


def test_sleep_frees_the_cache_and_wake_serves_again():
    engine, requests = make_engine(), make_requests(3)
    before = tokens(engine.generate(requests))
    engine.sleep()
    assert engine.cache is None
    with pytest.raises(RuntimeError, match=r"call wake\(\)"):
        engine.step()
    with pytest.raises(RuntimeError, match=r"wake\(\)"):
        engine.generate(requests)
    engine.wake()
    assert tokens(engine.generate(requests)) == before


def test_sleep_is_refused_while_rows_run():
    engine = make_engine()
    engine.add(make_requests(1)[0])
    engine.step()
    with pytest.raises(RuntimeError, match="1 rows are running; finish or abort them before sleep"):
        engine.sleep()


def test_abort_returns_what_was_sampled_so_far():
    engine, requests = make_engine(), make_requests(3)
    for request in requests:
        engine.add(request)
    engine.step()
    engine.step()
    stopped = engine.abort()
    assert {r.finish_reason for r in stopped} == {"abort"}
    assert tokens(stopped) == {uid: t[:2] for uid, t in tokens(generate(requests)).items()}
    assert not engine.rows
    assert not engine.waiting


# ---- errors ----


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([], [0]), "empty prompt or no uids"),
        (Request([1], []), "empty prompt or no uids"),
        (Request([1, 23], [0]), r"got token ids \[23\], need ids from 0 to 22"),
        (Request([-1], [0]), r"got token ids \[-1\]"),
        (Request([1] * 33, [0]), r"got 33 prompt \+ 32 new tokens, need at most 64"),
        (Request([1], range(5)), r"got 5 samples of one prompt, need at most max_rows=4"),
    ],
)
def test_a_request_that_can_never_run_is_an_error_at_once(request_, message):
    engine = make_engine(max_rows=4)
    with pytest.raises(ValueError, match=message):
        engine.add(request_)
    assert not engine.waiting


def test_a_request_that_just_fits_runs():
    (response,) = generate([Request([1] * 32, [0])])
    assert len(response.token_ids) == 32


def test_no_slots_are_an_error():
    with pytest.raises(ValueError, match="max_rows: got 0, need at least 1"):
        make_engine(max_rows=0)


def test_a_wrong_request_leaves_nothing_of_its_call_behind():
    engine = make_engine()
    with pytest.raises(ValueError, match="empty prompt"):
        engine.generate([*make_requests(2), Request([], [9])])
    assert not engine.waiting


def test_an_interrupted_generate_leaves_nothing_running():
    def interrupt(module, args, out):
        raise KeyboardInterrupt

    engine, requests = make_engine(max_rows=2), make_requests(4)
    engine.add(requests[0])
    engine.step()
    embedding = engine.decoder.inner.model.embed_tokens
    handle = embedding.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(requests[1:])
    handle.remove()
    engine.load_weights(make_model().weights, version=1)
    assert tokens(engine.generate(requests)) == tokens(generate(requests))
