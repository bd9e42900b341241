"""VLLMEngine on real vLLM for CPU: `make test-vllm`."""

import os
import subprocess
import sys
import textwrap

import psutil
import pytest
import torch
from small_models import make_model
from small_requests import make_requests
from vllm_models import SHAPE, assert_logprobs_are_those_of, trained

import rlkit as rk
from rlkit.engines import Request, vllm_worker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OLD, NEW = make_model(1, **SHAPE), make_model(2, **SHAPE)


@pytest.fixture(scope="module")
def engine():
    """One engine for the module: starting one takes seconds, and its weights can be replaced."""
    engine = rk.VLLMEngine(OLD, max_rows=32, seed=3)
    yield engine
    engine.close()


@pytest.fixture
def fresh(engine):
    engine.abort()
    engine.load_weights(OLD.weights, version=0)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_the_trainers(fresh, temperature):
    requests = make_requests(5, n=3, temperature=temperature, max_new_tokens=20)
    responses = fresh.generate(requests)
    assert [r.uid for r in responses] == list(range(15))
    assert_logprobs_are_those_of(OLD, requests, responses)


def test_greedy_tokens_are_torch_engines(fresh):
    requests = make_requests(6, temperature=0.0, max_new_tokens=24)
    expected = rk.TorchEngine(OLD).generate(requests)
    for ours, theirs in zip(fresh.generate(requests), expected, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)


def test_a_uid_draws_the_same_tokens_in_any_company(fresh):
    requests = make_requests(4, n=2, max_new_tokens=12)
    together = {r.uid: r.token_ids.tolist() for r in fresh.generate(requests)}
    alone = fresh.generate([Request(requests[2].prompt_ids, [5], requests[2].sampling)])
    assert alone[0].token_ids.tolist() == together[5]
    assert len({tuple(t) for t in together.values()}) > 4


def test_stop_tokens_belong_to_the_response_and_end_it(fresh):
    requests = make_requests(8, max_new_tokens=60, stop=range(40, 64))
    for response in fresh.generate(requests):
        body, last = response.token_ids[:-1], int(response.token_ids[-1])
        assert bool((body < 40).all())
        assert (response.finish_reason == "stop") == (last >= 40)
        assert response.stop_reason == (last if last >= 40 else None)


def test_interrupted_at_57_of_128_tokens(fresh):
    request = Request([3, 4, 5], [9], rk.SamplingParams(max_new_tokens=128))
    fresh.load_weights(OLD.weights, version=6)
    fresh.add(request)
    done = []
    while not done:
        if len(fresh.rows[9].tokens) == 57:
            fresh.load_weights(NEW.weights, version=7)
        done = fresh.step()
    (response,) = done
    assert response.token_version.tolist() == [6] * 57 + [7] * 71
    first, second = (trained(model, [request], done)[0] for model in (OLD, NEW))
    expected = torch.cat([first[:57], second[57:]])
    torch.testing.assert_close(response.logprobs, expected, atol=1e-4, rtol=0)


def test_no_cache_survives_a_change_of_weights(fresh):  # G6
    """vllm #9744. The prompt is longer than a block, so the prefix cache has it."""
    request = Request(list(range(3, 63)) + list(range(3, 63)), [0, 1, 2])
    fresh.generate([request])
    fresh.load_weights(NEW.weights, version=1)
    responses = fresh.generate([request])
    assert_logprobs_are_those_of(NEW, [request], responses)
    assert {v for r in responses for v in r.token_version.tolist()} == {1}


def test_weights_of_another_shape_are_refused_before_anything_changes(fresh):
    other = make_model(2, **SHAPE | {"intermediate_size": 95})
    with pytest.raises(ValueError, match="need"):
        fresh.load_weights(other.weights, version=1)
    missing = dict(list(NEW.weights.items())[1:])
    with pytest.raises(ValueError, match="missing"):
        fresh.load_weights(missing, version=1)
    assert fresh.version == 0
    requests = make_requests(3)
    assert_logprobs_are_those_of(OLD, requests, fresh.generate(requests))


def test_half_loaded_weights_serve_nothing_until_whole_ones_come(fresh, monkeypatch):
    """Rows that ran begin again under the weights that came whole."""

    def breaks(worker, kind, tensors):
        def some():
            yield from list(tensors.items())[:3]
            raise OSError("the link broke")

        worker.model_runner.reload_weights(weights_iterator=some())

    requests = make_requests(3)
    for request in requests:
        fresh.add(request)
    fresh.step()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_worker, "reload_weights", breaks)
        with pytest.raises(OSError, match="the link broke"):
            fresh.load_weights(NEW.weights, version=1)
    with pytest.raises(RuntimeError, match="half loaded"):
        fresh.step()
    assert fresh.version == 0
    fresh.load_weights(NEW.weights, version=1)
    done = []
    while fresh.rows:
        done += fresh.step()
    done.sort(key=lambda response: response.uid)
    assert_logprobs_are_those_of(NEW, requests, done)
    assert {v for r in done for v in r.token_version.tolist()} == {1}


def test_every_token_is_told_as_it_is_sampled(fresh):
    told = []
    responses = fresh.generate(make_requests(3, n=2), on_token=lambda *token: told.append(token))
    for response in responses:
        own = [token[1:] for token in told if token[0] == response.uid]
        assert [token for token, _ in own] == response.token_ids.tolist()
        assert [logprob for _, logprob in own] == pytest.approx(response.logprobs.tolist())


def test_aborted_rows_keep_what_they_have(fresh):
    for request in make_requests(3, max_new_tokens=40):
        fresh.add(request)
    for _ in range(5):
        fresh.step()
    (response,) = fresh.abort([1])
    assert (response.uid, response.finish_reason, len(response.token_ids)) == (1, "abort", 5)
    left = []
    while fresh.rows:
        left += fresh.step()
    assert sorted(r.uid for r in left) == [0, 2]
    assert all(len(r.token_ids) == 40 for r in left)


def test_paused_rows_go_on_where_they_were(fresh):
    requests = make_requests(2, max_new_tokens=10)
    expected = {r.uid: r.token_ids.tolist() for r in fresh.generate(requests)}
    for request in requests:
        fresh.add(request)
    fresh.step()
    fresh.pause()
    assert fresh.step() == []
    fresh.resume()
    done = {}
    while fresh.rows:
        done |= {r.uid: r.token_ids.tolist() for r in fresh.step()}
    assert done == expected


def test_what_vllm_cannot_say_is_refused(fresh):
    cut = rk.SamplingParams(top_p=0.9)
    with pytest.raises(ValueError, match="top_p"):
        fresh.add(Request([3], [0], cut))
    with pytest.raises(ValueError, match="need at most 256"):
        fresh.add(Request([3] * 250, [0]))
    assert not fresh.rows


def test_asleep_it_refuses_and_awake_it_serves(fresh):
    fresh.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        fresh.generate(make_requests(1))
    fresh.abort()
    fresh.wake()
    assert len(fresh.generate(make_requests(2))) == 2


def test_nothing_is_left_of_a_killed_driver():  # J11
    """vllm #1908: no child process, no shared memory."""
    code = """
        import time, rlkit as rk
        from small_models import make_model
        engine = rk.VLLMEngine(make_model(1, **SHAPE), max_rows=8)
        print("ready", flush=True)
        time.sleep(600)
    """
    code = textwrap.dedent(code).replace("SHAPE", repr(SHAPE))
    before = set(os.listdir("/dev/shm"))
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    try:
        assert b"ready\n" in iter(child.stdout.readline, b"")
        below = psutil.Process(child.pid).children(recursive=True)
    finally:
        child.kill()
        child.wait(timeout=30)
    _, alive = psutil.wait_procs(below, timeout=15)
    assert alive == []
    assert {n for n in set(os.listdir("/dev/shm")) - before if n.startswith("psm_")} == set()


def test_a_second_engine_in_a_process_is_refused(engine):
    with pytest.raises(RuntimeError, match="second engine in this process"):
        rk.VLLMEngine(OLD)


@pytest.mark.ray
def test_grpo_on_a_cluster_with_vllm_as_its_engine(ray_cluster):
    """Weights of the actor arrive in vLLM in another process, and are the actor's."""
    model = make_model(1, **SHAPE)
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, engine=rk.VLLMEngine, max_new_tokens=12)
    actor = ray_cluster.spawn(rk.ActorWorker, model, lr=1e-2)
    resharder = rk.Resharder(source=actor, target=rollout)
    prompts = [("", "")] * 4
    ids = [torch.tensor(request.prompt_ids) for request in make_requests(4)]
    batch = rk.Batch.from_columns(
        {
            "prompt": [p for p, _ in prompts],
            "answer": [a for _, a in prompts],
            "prompt_ids": ids,
            "group_ids": torch.arange(4),
        }
    )

    def loss(logprobs, batch):
        return -batch.token_mean(logprobs), {}

    for version in (1, 2):
        rows = rollout.generate(batch, n=2)
        rows["old_logprobs"] = actor.compute_logprobs(rows)
        gap = (rows["old_logprobs"] - rows["rollout_logprobs"]).abs() * rows["response_mask"]
        assert float(gap.max()) < 1e-4
        actor.update(rows, loss_fn=loss)
        assert resharder.reshard().version == version
