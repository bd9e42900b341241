"""Reward functions that hang, die or fail, and what is left of them."""

import contextlib
import functools
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit as rk
from rlkit.rewards import Killable, Verdict, close, killable


@pytest.fixture(autouse=True)
def closed(nothing_left_running):
    yield
    close()
    assert not children()


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if "rlkit.rewards.child" in p.cmdline()]


def ended(pid: int) -> bool:
    """Whether a process ends within 30 s."""
    for _ in range(300):
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        return True
    return False


def own_process(prompt, response, answer):
    return float(os.getpid())


def sleeps(prompt, response, answer):
    time.sleep(60 if response == "hang" else 0)
    return 1.0


def test_a_reward_is_that_of_the_function():
    fn = Killable(lambda prompt, response, answer: float(response == answer))
    assert [fn("p", "a", "a"), fn("p", "b", "a")] == [1.0, 0.0]


def test_it_runs_in_another_process_that_is_kept_for_the_next_call():
    fn = Killable(own_process)
    first, second = fn("", "", ""), fn("", "", "")
    assert first == second != os.getpid()


def test_a_hang_ends_in_two_seconds_as_a_timeout_not_as_zero():  # faults I2
    fn = Killable(sleeps)
    fn("", "", "")  # starts the process
    start_s = time.monotonic()
    verdict = fn("", "hang", "")
    assert 2.0 <= time.monotonic() - start_s < 20
    assert math.isnan(verdict)
    assert verdict.outcome == "timeout"
    assert children() == []


def test_after_a_timeout_the_next_call_works():
    fn = Killable(sleeps, timeout_s=0.2)
    assert fn("", "hang", "").outcome == "timeout"
    assert Killable(sleeps)("", "", "") == 1.0


def test_a_hang_that_never_runs_python_code_ends_too():
    fn = Killable(lambda prompt, response, answer: float(9**9**9), timeout_s=0.5)
    assert fn("", "", "").outcome == "timeout"


def test_what_the_function_started_ends_with_it(tmp_path):
    def starts_another(prompt, response, answer):
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        with open(response, "w") as file:
            file.write(str(child.pid))
        child.wait()

    path = tmp_path / "pid"
    assert Killable(starts_another, timeout_s=2)("", str(path), "").outcome == "timeout"
    assert ended(int(path.read_text()))


def test_a_hang_ends_with_the_process_that_waits_for_it(tmp_path):
    code = f"""
import os, time
from rlkit.rewards import Killable
def hangs(prompt, response, answer):
    with open({str(tmp_path / "pid")!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
Killable(hangs, timeout_s=5)("", "", "")
"""
    waiting = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.kill()
    waiting.wait()
    assert ended(int((tmp_path / "pid").read_text()))


def test_the_same_from_any_thread():
    fn = Killable(lambda prompt, response, answer: float(response))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: fn("", str(i), ""), range(40)))
    assert found == [float(i) for i in range(40)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_is_an_error_not_a_zero(number, caplog):
    fn = Killable(lambda prompt, response, answer: os.kill(os.getpid(), int(response)))
    with caplog.at_level(logging.WARNING):
        verdict = fn("", str(int(number)), "")
    assert (math.isnan(verdict), verdict.outcome) == (True, "error")
    assert f"exit {-number}" in caplog.text


def test_an_exit_of_the_function_is_named_by_its_code(caplog):
    def exits(prompt, response, answer):
        sys.exit(7)

    assert Killable(exits)("", "", "").outcome == "error"
    assert "exit 7" in caplog.text


def test_a_fork_of_the_function_answers_nothing():
    def forks(prompt, response, answer):
        return float(response) if os.fork() else float(response) + 100

    columns = {"prompt": [""] * 6, "response": list("012345"), "answer": [""] * 6}
    batch = rk.Batch.from_columns(columns)
    batch["rewards"] = rk.score(Killable(forks), batch)
    assert batch["rewards"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.ones((), requires_grad=True), True])
def test_scalars_of_torch_are_rewards_there_too(value):
    assert Killable(lambda prompt, response, answer: value)("", "", "") == 1.0


def test_what_is_no_number_is_an_error_that_says_so():
    fn = Killable(lambda prompt, response, answer: threading.Lock())
    with pytest.raises(RuntimeError, match="TypeError: reward function: got lock, need a float"):
        fn("", "", "")


def test_the_process_ends_in_silence_when_nobody_asks_any_more(capfd):
    fn = Killable(sleeps, timeout_s=30)
    fn("", "", "")
    ours = next(process for _, process in killable._idle)
    ours._connection.send((0, (("", "", ""), 30)))
    time.sleep(0.5)
    ours._connection.close()  # with an answer unread, that is a reset
    ours._popen.wait(20)
    close()
    assert capfd.readouterr().err == ""


def test_memory_has_a_limit():
    fn = Killable(lambda prompt, response, answer: float(len(b"x" * (10 << 30))), memory_gib=2)
    assert fn("", "", "").outcome == "error"


def test_what_the_function_raises_is_raised_with_its_traceback():
    fn = Killable(lambda prompt, response, answer: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero") as caught:
        fn("", "", "")
    assert "Traceback" in caught.value.__notes__[0]


def test_an_error_on_loading_says_what_it_was():
    class Unloadable:
        def __reduce__(self):
            return int, ("no number",)

        def __call__(self, prompt, response, answer): ...

    with pytest.raises(RuntimeError, match="invalid literal for int"):
        Killable(Unloadable())("", "", "")


def test_an_interrupt_leaves_no_answer_behind_for_the_next_call():
    fn = Killable(lambda prompt, response, answer: time.sleep(0.5) or float(response), timeout_s=20)
    fn("", "0", "")

    def interrupt(number, frame):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            fn("", "1", "")
    finally:
        signal.signal(signal.SIGALRM, old)
    assert fn("", "2", "") == 2.0


def test_a_batch_with_a_hang_has_a_nan_and_says_so(caplog):
    batch = rk.Batch.from_columns(
        {"prompt": ["", ""], "response": ["ok", "hang"], "answer": ["", ""]}
    )
    with caplog.at_level(logging.WARNING):
        batch["rewards"] = rk.score(Killable(sleeps, timeout_s=0.5, warm_up=("", "", "")), batch)
    assert batch["rewards"].isnan().tolist() == [False, True]
    assert "1 of 2 responses ended in timeout" in caplog.text


def test_a_batch_scored_again_uses_the_same_process():
    batch = rk.Batch.from_columns({"prompt": [""], "response": [""], "answer": [""]})
    fn = Killable(own_process)
    first, second = (float(rk.score(fn, batch).load().tensor) for _ in range(2))
    assert first == second


def test_idle_processes_are_few():
    for i in range(10):
        Killable(lambda prompt, response, answer, i=i: float(i))("", "", "")
    assert len(children()) <= 8


def test_threads_end_without_their_processes():
    fn, found = Killable(own_process), []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(fn("", "", "")))
        thread.start()
        thread.join()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "limits",
    [{"timeout_s": 0}, {"memory_gib": -1}, {"timeout_s": math.inf}, {"timeout_s": 1e10},
     {"memory_gib": math.nan}],
)  # fmt: skip
def test_limits_are_above_zero_and_what_the_system_can_hold(limits):
    with pytest.raises(ValueError, match=r"need both above 0 and at most 1e\+06"):
        Killable(own_process, **limits)


def test_what_is_no_function_is_an_error_at_once():
    with pytest.raises(TypeError, match="Killable: got 3, need a function"):
        Killable(3)


def test_parts_of_a_reward_are_made_killable_one_by_one():
    both = rk.rewards.combine({"a": (sleeps, 1.0)})
    for fn in (both, functools.partial(both)):
        with pytest.raises(TypeError, match=r"parts would be lost.* combine\({name: \(Killable"):
            Killable(fn)


@given(st.floats(), st.sampled_from(["ok", "timeout", "error"]))
def test_a_verdict_is_its_number_and_survives_a_journey(value, outcome):
    verdict = pickle.loads(pickle.dumps(Verdict(value, outcome)))
    assert verdict == value or math.isnan(value)
    assert verdict.outcome == outcome


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=50), st.text(max_size=50))
def test_any_text_is_judged_as_in_this_process(response, answer):
    fn = Killable(rk.algo.exact_match)
    assert fn("", response, answer) == rk.algo.exact_match("", response, answer)
