"""A run that stops and goes on is the run that never stopped, to the bit (one process)."""

import random

import numpy as np
import pytest
import torch
from short_run import make_model, make_run, make_task, records_of, restore, train, weights_of

import rlkit as rk


def local():
    return rk.launch(backend="local")


@pytest.fixture(scope="module")
def straight():
    return train(make_run(local()), None, steps=6)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(make_run(local()), rk.Checkpointer(folder), steps=6, stop=3)
    return train(make_run(local()), rk.Checkpointer(folder), steps=6)


def test_weights_are_equal_to_the_bit(straight, resumed):
    one, other = weights_of(straight), weights_of(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_optimizer_moments_are_equal_to_the_bit(straight, resumed):
    one, other = (run.actor._transport.worker.backend for run in (straight, resumed))
    moments = other.optimizer_state()
    assert one.num_steps == other.num_steps == 12
    assert len(moments) > 20
    assert all(torch.equal(tensor, moments[name]) for name, tensor in one.optimizer_state().items())


def test_prompts_responses_and_rewards_are_equal(straight, resumed):
    assert resumed.texts == straight.texts[3:]


def test_metrics_other_than_times_are_equal(straight, resumed):
    assert records_of(resumed) == records_of(straight)


def test_every_sample_is_trained_once_under_the_same_uid(straight, resumed):
    assert resumed.trained == straight.trained
    assert len(set(resumed.trained)) == len(resumed.trained) == 6 * 2 * 3


def test_versions_and_engine_follow(resumed):
    assert resumed.actor.version == resumed.rollout.version == 6


def test_resuming_at_every_step_changes_nothing(straight, tmp_path):
    for stop in range(1, 7):
        run = train(make_run(local()), rk.Checkpointer(tmp_path), steps=6, stop=stop)
    assert run.trained == straight.trained
    assert records_of(run) == records_of(straight)
    assert all(torch.equal(w, weights_of(run)[name]) for name, w in weights_of(straight).items())


def test_a_run_can_go_back_to_an_earlier_step(straight, tmp_path):
    checkpoint = rk.Checkpointer(tmp_path, keep_last=4)
    train(make_run(local()), checkpoint, steps=4)
    run = make_run(local())
    restored = checkpoint.load(**run.parts, step=1)
    assert restored.next_step == 2
    assert run.actor.version == 2
    assert records_of(run) == records_of(straight)[:2]
    assert run.log.sources == straight.log.sources != {}


def test_after_going_back_the_newest_save_counts_not_the_highest_step(tmp_path):
    checkpoint, run = rk.Checkpointer(tmp_path, keep_last=9), make_run(local())
    for step in range(4):
        checkpoint.save(step, **run.parts, counters={"branch": 0})
    checkpoint.load(**run.parts, step=1)
    checkpoint.save(2, **run.parts, counters={"branch": 1})
    restored = rk.Checkpointer(tmp_path).load(**run.parts)
    assert (restored.step, restored.counters) == (2, {"branch": 1})
    assert rk.Checkpointer(tmp_path).load(**run.parts, step=2).counters == {"branch": 1}


def test_an_empty_folder_starts_a_new_run(tmp_path):
    run = make_run(local())
    first, batches = restore(run, rk.Checkpointer(tmp_path / "new"))
    assert (first, batches, run.prompts.position, len(run.log)) == (0, {}, 0, 0)


def test_random_generators_of_the_driver_go_on(tmp_path):
    checkpoint, run = rk.Checkpointer(tmp_path), make_run(local())

    def draw():
        new = np.random.default_rng  # noqa: F841 (the global one is what is saved)
        return random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))  # noqa: NPY002

    draw()  # leaves half of a pair of normal numbers behind, in both generators
    checkpoint.save(0, **run.parts)
    expected = [draw() for _ in range(3)]
    checkpoint.load(**run.parts)
    assert [draw() for _ in range(3)] == expected


def test_counters_come_back_as_they_were(tmp_path):
    checkpoint, run = rk.Checkpointer(tmp_path), make_run(local())
    counters = {"accepted": 8, "kl_coef": 0.1 + 0.2, "list": [1, "x", None, [True]], "d": {"a": {}}}
    checkpoint.save(0, **run.parts, counters=counters)
    assert checkpoint.load(**run.parts).counters == counters


def test_prompts_drawn_again_after_a_resume_get_new_uids(tmp_path):
    checkpoint, run = rk.Checkpointer(tmp_path), make_run(local())
    prompts = next(run.prompts)
    first = run.rollout.generate(prompts, n=2)
    batches = {"prompts": prompts, "first": prompts.select([0])}
    checkpoint.save(0, **run.parts, batches=batches)
    expected = run.rollout.generate(prompts, n=2)
    found = checkpoint.load(**run.parts).batches
    again = run.rollout.generate(found["prompts"], n=2)
    assert again.uids.tolist() == expected.uids.tolist()
    assert not set(again.uids.tolist()) & set(first.uids.tolist())
    assert again["response"] == expected["response"]
    assert found["first"].draws is found["prompts"].draws


def test_the_learning_rate_goes_on_in_its_schedule(straight, resumed):
    rates = [record["actor/lr"] for record in resumed.log.records]
    assert rates == [record["actor/lr"] for record in straight.log.records]
    assert len(set(rates)) == 6


def test_a_save_before_the_first_update_can_be_loaded(straight, tmp_path):
    checkpoint, run = rk.Checkpointer(tmp_path), make_run(local())
    checkpoint.save(0, **run.parts)
    other = train(make_run(local()), None, steps=2)
    checkpoint.load(**other.parts)
    assert (other.actor.version, len(other.log), other.prompts.position) == (0, 0, 0)
    worker = other.actor._transport.worker
    assert worker.backend.optimizer_state() == {}
    assert train(other, None, steps=6).texts[2:] == straight.texts


def test_saving_asks_nothing_of_the_rollout(tmp_path):
    run = train(make_run(local()), None, steps=1)
    mark = rk.trace.current().mark()
    report = rk.Checkpointer(tmp_path).save(0, **run.parts)
    spans = rk.trace.current().since(mark)
    assert {span.worker for span in spans} == {"driver", "actor/0"}
    assert report.seconds > 0
    assert report.bytes == sum(f.stat().st_size for f in report.path.rglob("*") if f.is_file())


def test_grpo_stopped_and_gone_on_is_grpo(tmp_path):
    config = {"size": 2, "n": 3, "lr": 1e-2, "max_new_tokens": 4, "eval_every": 2}
    task, model = rk.tasks.reverse_digits(length=2), make_model()

    def run(steps, checkpoint=None):
        whole = rk.recipes.GRPOConfig(steps=steps, save_every=2, eval_prompts=4, **config)
        return rk.recipes.grpo(local(), model, task, whole, checkpoint=checkpoint).log

    expected, folder = run(5), tmp_path / "run"
    run(3, rk.Checkpointer(folder))
    log = run(5, rk.Checkpointer(folder))
    assert _plain(log) == _plain(expected)
    again = run(5, rk.Checkpointer(folder))  # done already: nothing is left to do
    assert _plain(again) == _plain(expected)


def _plain(log):
    timed = ("time/", "throughput/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in log.records]


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoint = rk.Checkpointer(tmp_path, keep_last=2, best=lambda record: record["reward"])
    run = make_run(local())
    for step, reward in enumerate([0.1, 0.7, 0.3, float("nan"), 0.6, 0.5]):
        run.log.add(step, reward=reward)
        checkpoint.save(step, **run.parts)
    frame = checkpoint.frame()
    assert frame["step"].tolist() == [1, 4, 5]
    assert frame["score"].tolist() == [0.7, 0.6, 0.5]
    assert checkpoint.load(**run.parts, step=1).next_step == 2


def test_a_worker_saves_and_loads_on_its_own(tmp_path):
    actor = rk.ActorWorker(make_model(), lr=1e-2)
    receipt = actor.save_state(tmp_path)
    assert sorted(receipt) == sorted(path.name for path in tmp_path.iterdir())
    other = rk.ActorWorker(rk.models.tiny(spec=make_model().spec, seed=2), lr=1e-2)
    other.load_state(tmp_path)
    assert other.fingerprints() == actor.fingerprints()


def test_a_large_state_is_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("rlkit.workers.shards.SHARD_BYTES", 3000)
    run = train(make_run(local()), rk.Checkpointer(tmp_path), steps=1)
    (saved,) = tmp_path.glob("*_step_0/workers/actor")
    assert len(list(saved.glob("weights.*.safetensors"))) > 3
    other = make_run(local())
    rk.Checkpointer(tmp_path).load(**other.parts)
    assert other.actor.fingerprints() == run.actor.fingerprints()


def test_the_task_of_this_file_ends_epochs_within_batches():
    task = make_task()
    groups = [b["group_ids"] - task.first_group_id() for b in task.batches(size=2, steps=3)]
    assert groups[2].tolist() == [4, 5]
