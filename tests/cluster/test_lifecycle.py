"""What a long session does to a cluster: interrupts, deaths, edits, floods. Nothing hangs, nothing
is left behind.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest
import torch

import rlkit as rk
from rlkit.cluster.calls import current_class

pytestmark = pytest.mark.ray


class Toy:
    """A worker whose calls take time in Python, or in C."""

    def __init__(self, answer=1):
        self.given = answer

    def answer(self):
        return self.given

    def loop(self, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.01)
        return "done"

    def sleep(self, seconds):
        time.sleep(seconds)

    def chatter(self, lines):
        for i in range(lines):
            print(f"line {i}")

    def environment(self, name):
        return os.environ.get(name)

    def pid(self):
        return os.getpid()


def interrupt_after(seconds):
    """Ctrl-C in this process, as Jupyter's stop button sends it."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


def frozen(rows=8):
    """A batch for updates: no rollout needed."""
    return rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([1, 4, 5])] * rows,
            "response_ids": [torch.tensor([6, 7, 2])] * rows,
            "response_mask": torch.ones(rows, 3, dtype=torch.int8),
            "group_ids": [i // 2 for i in range(rows)],
        }
    )


def likelihood(logprobs, batch):
    return batch.token_mean(-logprobs), {}


def slow(logprobs, batch):
    time.sleep(0.2)
    return likelihood(logprobs, batch)


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


# ---- interrupts ----


def test_after_an_interrupted_call_the_next_answers_at_once(ray_cluster):
    toy = ray_cluster.spawn(Toy)
    interrupt_after(1.0)
    with pytest.raises(KeyboardInterrupt):
        toy.loop(60)
    start = time.monotonic()
    assert toy.answer() == 1
    print(f"answered after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 15


def test_a_call_that_cannot_stop_is_named_by_the_next(ray_cluster):
    toy = ray_cluster.spawn(Toy, name="sleeper")
    interrupt_after(0.5)
    with pytest.raises(KeyboardInterrupt):
        toy.sleep(20)
    with pytest.raises(RuntimeError, match=r"sleeper/0 still running sleep, for \d+ s.*checkpoint"):
        toy.answer()


@pytest.mark.slow
def test_an_interrupted_update_on_two_ranks_goes_on_with_equal_weights(ray_cluster):
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(), lr=1e-3, n=2, name="pair")
    interrupt_after(1.5)
    with pytest.raises(KeyboardInterrupt):
        actor.update(frozen(), loss_fn=slow, minibatches=4, epochs=60)
    actor.update(frozen(), loss_fn=likelihood)
    one, two = actor.weights()
    assert equal(one, two)


def test_an_interrupted_generation_leaves_a_usable_engine(ray_cluster):
    model = rk.models.tiny(spec=rk.models.tiny_spec(), seed=3)
    rollout = ray_cluster.spawn(rk.RolloutWorker, model, max_new_tokens=100, name="stopped")
    task = rk.tasks.reverse_digits(length=6)

    def generate_for_long():
        for prompts in task.batches(size=32, steps=1000):
            rollout.generate(prompts, n=8)

    interrupt_after(1.0)
    with pytest.raises(KeyboardInterrupt):
        generate_for_long()
    batch = rollout.generate(next(task.batches(size=2, steps=1)), n=2)
    assert len(batch) == 4


# ---- failures of one rank ----


def fails_on_one_rank(logprobs, batch):
    if 0 in batch.uids:
        raise ArithmeticError("only here")
    return likelihood(logprobs, batch)


def test_an_error_on_one_rank_is_raised_and_its_peer_released(ray_cluster):
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(), lr=1e-3, n=2, name="uneven")
    start = time.monotonic()
    with pytest.raises(ArithmeticError, match="only here"):
        actor.update(frozen(), loss_fn=fails_on_one_rank)
    print(f"raised after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 60
    actor.update(frozen(), loss_fn=likelihood)
    assert equal(*actor.weights())


def test_a_rank_killed_in_a_collective_is_named_and_its_peer_released(ray_cluster):
    actor = ray_cluster.spawn(rk.ActorWorker, rk.models.tiny(), lr=1e-3, n=2, name="mortal")
    victim = actor._describe()[1]["pid"]
    future = actor.submit.update(frozen(), loss_fn=slow, minibatches=4, epochs=100)
    time.sleep(1.5)
    os.kill(victim, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="worker mortal/1 died"):
        future.result()
    print(f"named after {time.monotonic() - start:.2f} s")
    assert time.monotonic() - start < 60
    ray_cluster.respawn(actor)
    actor.update(frozen(), loss_fn=likelihood)


# ---- edits ----


def test_respawn_brings_the_class_as_its_module_has_it_now(ray_cluster):
    space = sys.modules[__name__]
    first = space.Toy
    group = ray_cluster.spawn(first, name="edited_class")
    try:
        space.Toy = type("Toy", (first,), {"answer": lambda self: "edited", "__module__": __name__})
        assert group.answer() == 1
        ray_cluster.respawn(group)
        assert group.answer() == "edited"
    finally:
        space.Toy = first


def test_a_class_that_is_gone_from_its_module_stays_itself():
    hidden = type("Hidden", (), {"__module__": __name__})
    assert current_class(hidden) is hidden


# ---- output ----


def test_ten_thousand_printed_lines_are_shown_in_few_portions(ray_cluster, capsys):
    toy = ray_cluster.spawn(Toy, name="chatty")
    toy.chatter(10_000)
    deadline = time.monotonic() + 60
    shown = ""
    while "line 9999\n" not in shown and time.monotonic() < deadline:
        time.sleep(0.5)
        ray_cluster.relay.flush()
        shown += capsys.readouterr().out
    assert "line 9999\n" in shown
    assert "lines of workers left out" in shown
    assert shown.count("\n") < 5_000


# ---- the driver's end ----

DRIVER = """
import os, sys, time
import rlkit as rk

class Toy:
    def pid(self):
        return os.getpid()

cluster = rk.launch(num_devices=2)
toy = cluster.spawn(Toy)
print("ready", toy.pid(), flush=True)
"""


def start_driver(tail, **environment):
    """A driver in a process of its own, when its cluster is up."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER + textwrap.dedent(tail)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    for line in driver.stdout:
        if line.startswith("ready"):
            return driver
    raise AssertionError("the driver ended before its cluster was up")


def session_processes(driver):
    """Every process that the driver started, and theirs."""
    return psutil.Process(driver.pid).children(recursive=True)


def gone_after(processes, limit_s):
    """Seconds until all are gone; AssertionError if some are left after ``limit_s``."""
    start = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, f"left: {alive}"
    return time.monotonic() - start


def test_nothing_survives_a_killed_driver():
    driver = start_driver("time.sleep(600)")
    processes = session_processes(driver)
    assert len(processes) > 5
    driver.kill()
    driver.wait(30)
    print(f"gone after {gone_after(processes, 60):.1f} s")


@pytest.mark.slow
def test_nothing_survives_a_driver_that_just_ends():
    driver = start_driver("")
    processes = session_processes(driver)
    driver.wait(120)
    print(f"gone after {gone_after(processes, 60):.1f} s")


@pytest.mark.slow
def test_a_driver_outlives_its_head_and_says_cluster_lost():
    driver = start_driver(
        """
        import psutil
        head = [p for p in psutil.Process().children(recursive=True) if "gcs_server" in p.name()]
        assert head
        head[0].kill()
        start = time.time()
        while cluster.open and time.time() - start < 40:
            time.sleep(0.5)
        try:
            toy.pid()
        except ConnectionError as error:
            print(error, flush=True)
        print(repr(cluster), flush=True)
        time.sleep(max(0, 32 - (time.time() - start)))  # Ray itself would have ended this process
        again = rk.launch(num_devices=1)
        print("again", again.spawn(Toy).pid(), flush=True)
        """,
        RAY_gcs_rpc_server_reconnect_timeout_s="15",
    )
    out, _ = driver.communicate(timeout=300)
    assert "cluster lost: its head process ended" in out
    assert "cluster lost)" in out
    assert "again" in out
    assert driver.returncode == 0


# ---- addresses ----


@pytest.mark.slow
def test_a_stale_address_in_the_environment_starts_a_cluster_here():
    code = """
    import logging, os, time
    logging.basicConfig()
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    import rlkit as rk
    start = time.time()
    cluster = rk.launch(num_devices=1)
    print(cluster, f"{time.time() - start:.1f} s")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert "RAY_ADDRESS=127.0.0.1:1 does not answer: starting a cluster here" in done.stderr
    assert "RayCluster(1 x cpu" in done.stdout
    print(done.stdout)


def test_an_address_that_is_given_must_answer():
    code = "import rlkit as rk; rk.launch(address='127.0.0.1:1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "ConnectionError: launch: nothing answers at address='127.0.0.1:1'" in done.stderr
