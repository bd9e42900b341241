"""kill -9 at random moments: every resume succeeds, no sample is lost or trained twice.

Relative to the saved weights, that is: after all the kills, weights, log and trained uids are those
of a run that was never killed. Longer: pytest tests/checkpoint/test_kill.py -m slow
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from short_run import make_run, make_task, records_of, train, weights_of

import rlkit as rk

SCRIPT = Path(__file__).parent / "short_run.py"
WAIT_S = 180


def local():
    return rk.launch(backend="local")


def uids_of(first_step: int, num_steps: int) -> list[int]:
    """uids of a run that was never stopped: two prompts a step, three samples of each."""
    first = make_task().first_group_id() + 2 * first_step
    groups = range(first, first + 2 * num_steps)
    return [(group << 16) + sample for group in groups for sample in range(3)]


def run_script(errors, *args: str) -> subprocess.Popen:
    """The script in a session of its own."""
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def wait_ready(process: subprocess.Popen) -> int | None:
    """Process id of the run that is about to load; None if there is none any more."""
    while line := process.stdout.readline():
        if line.startswith("ready"):
            return int(line.split()[1])
        assert not line.startswith("ended"), line
    return None


class InForks:
    """Runs in one process, each in a fork of a script that has loaded what it needs."""

    def __init__(self, errors) -> None:
        self.server = run_script(errors)

    def start(self, folder: Path) -> int:
        print(folder, 10**9, file=self.server.stdin, flush=True)
        pid = wait_ready(self.server)
        assert pid is not None, f"the script ended with {self.server.wait()}"
        return pid

    def ended(self, pid: int) -> int:
        """Exit code of the run that was killed."""
        return int(self.server.stdout.readline().split()[1])

    def close(self) -> None:
        self.server.stdin.close()
        end_session(self.server.pid)
        self.server.wait()


class OnRay:
    """Runs on Ray clusters of their own, each started by a new interpreter."""

    def __init__(self, errors) -> None:
        self.errors = errors

    def start(self, folder: Path) -> int:
        for _ in range(3):  # on a busy machine Ray may miss the 30 s in which it must start
            self.process = run_script(self.errors, str(folder), str(10**9), "ray")
            pid = wait_ready(self.process)
            if pid is not None:
                return pid
            end_session(self.process.pid)
        raise AssertionError(f"the run ended with {self.process.wait()} before it was ready")

    def ended(self, pid: int) -> int:
        code = self.process.wait()
        end_session(pid)
        return code

    def close(self) -> None:
        end_session(self.process.pid)


def end_session(session: int, *, wait_s: float = 20) -> None:
    """Wait for the processes of a killed driver to end, and end those that do not."""
    deadline_s = time.monotonic() + wait_s
    while left := [p for p in psutil.pids() if in_session(p, session)]:
        if time.monotonic() > deadline_s:
            for pid in left:
                psutil.Process(pid).kill()
            return
        time.sleep(0.1)


def in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False


def newest(folder: Path) -> int:
    """Number of the newest save, -1 if there is none."""
    return max((int(p.name[:6]) for p in folder.glob("0*_step_*")), default=-1)


def kill_at_random(pid: int, folder: Path, rng: random.Random) -> None:
    """Kill a run some saves and some milliseconds on, be it while it loads, trains or saves."""
    goal, deadline_s = newest(folder) + rng.randrange(5), time.monotonic() + WAIT_S
    while newest(folder) < goal and psutil.pid_exists(pid):
        assert time.monotonic() < deadline_s, f"no save {goal} within {WAIT_S} s"
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.04))
    os.kill(pid, signal.SIGKILL)


def check_what_is_saved(folder: Path, run) -> int:
    """Load what the killed run left: a prefix of the run never killed, and what comes next."""
    restored = rk.Checkpointer(folder).load(**run.parts)
    if restored.step is None:
        return 0
    assert restored.counters["trained"] == uids_of(0, restored.next_step)
    assert restored.batches["following"].uids.tolist() == uids_of(restored.next_step, 1)
    assert run.actor.version == len(run.log) == restored.next_step
    # Handed out = trained + in flight, the rule that admits new prompts after a resume (faults F1).
    assert run.prompts.position == 2 * run.actor.version + 2
    return restored.next_step


def kill_again_and_again(folder: Path, runs: type, *, num_kills: int) -> tuple[int, int]:
    """Kill runs that go on from each other; how many steps are saved in the end, and how many of
    the runs were saving when they were killed.
    """
    rng, run, saving, done = random.Random(num_kills), make_run(local()), 0, 0
    target = folder / "run"
    target.mkdir()
    with (folder / "errors").open("w+") as errors:
        life = runs(errors)
        try:
            for _ in range(num_kills):
                pid = life.start(target)
                kill_at_random(pid, target, rng)
                assert life.ended(pid) == -signal.SIGKILL
                saving += any(path.is_dir() for path in target.glob(".*_step_*"))
                done = check_what_is_saved(target, run)
        except BaseException:
            errors.seek(0)
            print(errors.read()[-4000:])
            raise
        finally:
            life.close()
    return done, saving


def finish(folder: Path, steps: int, backend: str) -> None:
    """The last run goes on to the end, in an interpreter of its own."""
    command = [sys.executable, str(SCRIPT), str(folder / "run"), str(steps), backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout.endswith("done\n"), done.stderr
    assert done.returncode == 0


def assert_never_noticed(folder: Path, steps: int) -> None:
    """Compare the end of the killed runs, to the bit, with a run that was never killed."""
    expected, run = train(make_run(local()), None, steps=steps), make_run(local())
    restored = rk.Checkpointer(folder / "run").load(**run.parts)
    assert restored.next_step == steps
    assert restored.counters["trained"] == expected.trained == uids_of(0, steps)
    assert records_of(run) == records_of(expected)
    weights = weights_of(run)
    assert all(torch.equal(w, weights[name]) for name, w in weights_of(expected).items())


def test_five_kills_leave_no_trace(tmp_path):
    done, saving = kill_again_and_again(tmp_path, InForks, num_kills=5)
    print(f"5 kills, {saving} of them while saving; {done} steps saved")
    finish(tmp_path, done + 2, "local")
    assert_never_noticed(tmp_path, done + 2)


@pytest.mark.slow
def test_fifty_kills_leave_no_trace(tmp_path):
    done, saving = kill_again_and_again(tmp_path, InForks, num_kills=50)
    print(f"50 kills, {saving} of them while saving; {done} steps saved")
    assert saving > 0
    finish(tmp_path, done + 2, "local")
    assert_never_noticed(tmp_path, done + 2)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 5])
def test_kills_on_ray_lose_no_sample_and_train_none_twice(tmp_path, num_kills):
    done, _ = kill_again_and_again(tmp_path, OnRay, num_kills=num_kills)
    steps = done + 2
    finish(tmp_path, steps, "ray")
    expected, run = train(make_run(local()), None, steps=steps), make_run(local())
    restored = rk.Checkpointer(tmp_path / "run").load(**run.parts)
    assert restored.counters["trained"] == expected.trained == uids_of(0, steps)
    losses = [[r["policy/loss"] for r in each.log.records] for each in (run, expected)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
