import random
import subprocess
import sys
import threading
import time
from itertools import count

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit import nb
from rlkit.device import platform


def wait_until(condition, *, timeout_s: float = 30) -> None:
    """Return when ``condition()`` is true; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def paused_after_one_step() -> nb.Background:
    """An endless loop, paused while its first step ran."""
    gate = threading.Event()

    def loop():
        gate.wait(60)
        yield from count()

    work = nb.background(loop)
    work.pause()
    gate.set()
    wait_until(lambda: work.steps == 1)
    return work


def stays_at(work: nb.Background, steps: int) -> bool:
    """Whether the loop has done that many steps and does no more."""
    wait_until(lambda: work.steps >= steps)
    time.sleep(0.05)
    return work.steps == steps


# ---- full and short runs ----


@pytest.mark.parametrize(("value", "expected"), [("1", 3), ("0", 100), ("", 100), (None, 100)])
def test_the_short_form_runs_where_the_variable_says_so(value, expected, monkeypatch):
    monkeypatch.delenv("RLKIT_FAST", raising=False)
    if value is not None:
        monkeypatch.setenv("RLKIT_FAST", value)
    assert nb.pick(100, ci=3) == expected
    assert nb.fast() == (expected == 3)


# ---- the first cell ----


def test_setup_prints_one_line(capsys):
    nb.setup(seed=5)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    for word in ("rlkit ", "Python ", "torch ", f" x {platform('auto').kind}", "seed 5"):
        assert word in line


def test_setup_seeds_python_numpy_and_torch():
    drawn = []
    for seed in (1, 1, 2):
        nb.setup(seed=seed)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


# ---- loops in the background ----


def test_a_loop_runs_to_its_end_off_the_main_thread():
    names = []
    work = nb.background(names.append(threading.current_thread().name) for _ in range(3))
    work.wait(timeout_s=30)
    assert (work.steps, work.state) == (3, "done")
    assert set(names) == {"rlkit-loop"}


def test_a_function_that_makes_the_loop_is_taken_too():
    work = nb.background(lambda: range(4))
    work.wait(timeout_s=30)
    assert work.steps == 4


def test_a_loop_without_steps_is_done():
    work = nb.background([])
    work.wait(timeout_s=30)
    assert (work.steps, work.state) == (0, "done")


def test_pause_stops_after_the_step_that_runs_and_resume_goes_on():
    work = paused_after_one_step()
    assert stays_at(work, 1)
    assert work.state == "paused"
    work.resume()
    assert work.state == "running"
    wait_until(lambda: work.steps > 10)
    work.stop()


def test_step_does_one_step_of_a_paused_loop():
    work = paused_after_one_step()
    for steps in (2, 3):
        work.step()
        assert stays_at(work, steps)
    assert work.state == "paused"
    work.stop()


@pytest.mark.parametrize("start", [paused_after_one_step, lambda: nb.background(count())])
def test_stop_ends_the_loop_whether_it_is_paused_or_not(start):
    work = start()
    work.stop()
    assert work.state == "done"
    assert stays_at(work, work.steps)


def test_stop_closes_what_the_loop_had_open():
    closed = threading.Event()

    def loop():
        try:
            yield from count()
        finally:
            closed.set()

    nb.background(loop).stop()
    assert closed.wait(30)
    closed.clear()
    work = nb.background(loop())
    wait_until(lambda: work.steps)
    work.stop()
    assert closed.wait(30)


def test_an_error_of_the_loop_is_kept_and_raised_by_wait():
    def loop():
        yield
        raise ValueError("reward went missing")

    work = nb.background(loop)
    for _ in range(2):
        with pytest.raises(ValueError, match="reward went missing"):
            work.wait(timeout_s=30)
    assert (work.state, work.steps) == ("failed", 1)
    assert repr(work) == "Background(failed, 1 steps, ValueError: reward went missing)"
    with pytest.raises(ValueError, match="reward went missing"):
        work.stop()


def test_a_step_that_does_not_end_is_a_timeout_that_names_it():
    go_on = threading.Event()

    def loop():
        yield
        go_on.wait(60)
        yield

    work = nb.background(loop)
    wait_until(lambda: work.steps == 1)
    with pytest.raises(TimeoutError, match="still in step 1 after 0 s"):
        work.stop(timeout_s=0.05)
    go_on.set()
    work.wait(timeout_s=30)
    assert work.state == "done"


def test_displayed_handles_keep_no_rows():
    """Five batches as results of cells; when their names are gone, so are their rows."""
    code = """
import gc
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import torch, rlkit as rk; rk.nb.setup()")
shell.run_cell("from rlkit.batch.store import LocalStore; store = LocalStore()")
for i in range(5):
    made = f"b{i} = rk.Batch.from_columns({{'x': torch.zeros(4, 1000)}}, store=store)"
    shell.run_cell(made + chr(10) + f"b{i}", store_history=True)
assert len(shell.user_ns["store"].shelf) == 5
assert shell.user_ns["Out"][1].columns.keys() == {"x"}
shell.run_cell("del b0, b1, b2, b3, b4", store_history=True)
gc.collect()
print("left", len(shell.user_ns["store"].shelf), shell.user_ns["Out"][1])
try:
    shell.user_ns["Out"][1].columns
except ReferenceError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "left 0 Batch(4 rows, columns ['x']) (freed)" in done.stdout, done.stdout + done.stderr
    assert "Give it a name in the cell that makes it" in done.stdout


def test_fields_of_a_config_have_their_docstrings_also_inherited_ones():
    frame = nb.fields(rk.recipes.GRPOConfig).set_index("name")
    assert frame.loc["lr", "meaning"] == "AdamW's learning rate."  # of LoopConfig
    assert "KL to the reference" in frame.loc["kl_coef", "meaning"]
    assert nb.fields(rk.Layout)["default"].tolist()[:3] == ["1", "1", "None"]
    assert nb.fields(rk.sim.Lengths)["default"][0] == "needed"


def test_fields_of_what_has_none_are_refused():
    with pytest.raises(TypeError, match=r"need a dataclass such as rk\.sim\.Run"):
        nb.fields(rk.launch)
