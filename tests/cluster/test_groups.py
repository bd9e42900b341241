"""Worker groups on Ray: calls, futures, errors, what is freed."""

import gc
import os
import signal
import time

import psutil
import pytest
import torch

import rlkit as rk

pytestmark = pytest.mark.ray


class Toy:
    """A worker of a test: plain methods, no batch."""

    def __init__(self, start=0):
        self.value = start

    def add(self, amount):
        self.value += amount
        return self.value

    def sleep(self, seconds):
        time.sleep(seconds)
        return "awake"

    def fail(self):
        raise ZeroDivisionError("by design")

    def pid(self):
        return os.getpid()

    def call(self, fn):
        return fn()


class Broken:
    def __init__(self):
        raise OSError("no such weights")


@pytest.fixture(scope="module")
def toy(ray_cluster):
    return ray_cluster.spawn(Toy, 10)


def make_batch(rows=4):
    return rk.Batch.from_columns(
        {
            "prompt": ["1>"] * rows,
            "response": ["a"] * rows,
            "answer": ["a"] * rows,
            "prompt_ids": [torch.tensor([1, 4])] * rows,
            "response_ids": [torch.tensor([5, 2])] * rows,
            "response_mask": torch.ones(rows, 2, dtype=torch.int8),
        }
    )


def test_state_stays_between_calls(toy):
    first = toy.add(1)
    assert toy.add(2) == first + 2


def test_workers_are_processes_of_their_own(toy):
    assert toy.pid() != os.getpid()


def test_two_workers_answer_in_rank_order(ray_cluster):
    pair = ray_cluster.spawn(Toy, n=2)
    assert pair.pid() == [row["pid"] for row in pair._describe()]


def test_submit_returns_before_the_call_ends(toy):
    future = toy.submit.sleep(0.5)
    assert not future.done()
    assert future.result() == "awake"
    assert future.done()


def test_a_worker_error_keeps_its_type_and_names_the_worker(toy):
    with pytest.raises(ZeroDivisionError, match="by design") as caught:
        toy.fail()
    assert "toy/0" in caught.value.__notes__[0]


def test_an_unknown_method_lists_the_known_ones(toy):
    with pytest.raises(AttributeError, match=r"need one of.*add"):
        toy.multiply(2)


def test_a_failing_constructor_is_reported_at_spawn(ray_cluster):
    with pytest.raises(OSError, match="no such weights"):
        ray_cluster.spawn(Broken)
    assert "broken" not in ray_cluster.groups


def test_a_timeout_names_worker_and_method(toy):
    with pytest.raises(TimeoutError, match=r"toy\.sleep: toy/0 did not answer within 0"):
        toy.submit.sleep(2.0).result(timeout_s=0.2)


def test_a_killed_worker_is_named_and_respawn_brings_it_back(ray_cluster):
    group = ray_cluster.spawn(Toy, name="doomed")
    os.kill(group.pid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"doomed/0 died.*respawn"):
        group.add(1)
    ray_cluster.respawn(group)
    assert group.add(1) == 1


def test_too_many_workers_say_what_is_needed_and_free(ray_cluster):
    with pytest.raises(ValueError, match="1000 more workers need 1000 devices"):
        ray_cluster.spawn(Toy, n=1000)


def test_a_group_nobody_names_frees_its_devices_and_process(ray_cluster):
    gc.collect()  # groups of other tests
    group, before = ray_cluster.spawn(Toy, name="forgotten"), ray_cluster.num_devices_in_use
    pid = group.pid()
    del group
    gc.collect()
    assert ray_cluster.num_devices_in_use == before - 1
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)


def test_a_function_that_captures_a_lock_says_so(toy):
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="can't be sent to a worker"):
        toy.call(lambda: lock)


def test_an_edited_function_reaches_a_running_worker(toy):
    space = {}
    exec("def answer(): return 1", space)
    assert toy.call(space["answer"]) == 1
    exec("def answer(): return 2", space)
    assert toy.call(space["answer"]) == 2


def test_score_runs_outside_the_driver(ray_cluster):
    rollout = ray_cluster.spawn(rk.RolloutWorker, rk.models.tiny(), name="scored", max_new_tokens=2)
    task = rk.tasks.reverse_digits(length=3)
    batch = rollout.generate(next(task.batches(size=2, steps=1)), n=2)
    batch["pid"] = batch.apply(lambda text: [os.getpid()] * len(text), "response")
    assert set(batch["pid"].tolist()).isdisjoint({os.getpid()})


def test_a_reward_error_names_the_row(ray_cluster):
    batch = make_batch().on(ray_cluster.store)
    with pytest.raises(KeyError) as caught:
        rk.score(lambda prompt, response, answer: {}[prompt], batch)
    assert "failed on row 0: prompt='1>'" in "".join(caught.value.__notes__)


def test_a_column_nobody_names_is_freed(ray_cluster):
    import ray

    store = next(iter(ray_cluster.store.actors.values()))

    def num_keys():
        gc.collect()
        time.sleep(0.3)
        return ray.get(store.stats.remote(), timeout=30)["keys"]

    before = num_keys()
    batch = make_batch().on(ray_cluster.store)
    assert num_keys() > before
    del batch
    assert num_keys() == before


def test_a_column_comes_back_before_it_is_computed(ray_cluster):
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(), name="lazy")
    column = actor.compute_logprobs(make_batch())
    assert column.pending
    assert column.load().padded().shape == (4, 2)


def test_a_batch_of_the_notebook_is_left_as_it_was(ray_cluster):
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(), name="guest")
    batch = make_batch()
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    assert batch["response"] == ["a"] * 4
    assert batch["old_logprobs"].shape == (4, 2)


def test_drawing_again_from_the_same_prompts_gives_new_rows(ray_cluster):
    rollout = ray_cluster.spawn(rk.RolloutWorker, rk.models.tiny(), name="again")
    prompts = next(rk.tasks.reverse_digits(length=6).batches(size=2, steps=1))
    one, two = rollout.generate(prompts, n=3), rollout.generate(prompts, n=3)
    assert set(one.uids).isdisjoint(two.uids)
    assert one["response"] != two["response"]


def test_html_views_make_no_remote_call(ray_cluster, toy):
    assert "toy/0" in toy._repr_html_()
    assert "Toy" in ray_cluster._repr_html_()
