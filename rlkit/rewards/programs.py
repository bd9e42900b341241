"""Rewards of Python programs: a candidate runs against tests under limits."""

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.checks import whole
from rlkit.rewards.killable import MOST
from rlkit.rewards.verdict import Verdict

SANDBOX = Path(__file__).with_name("sandbox.py")
GRACE_S = 30.0  # beyond timeout_s, for two starts of Python on a loaded machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one run of a program may use."""

    timeout_s: float = 5.0
    """Seconds by the clock, and of processor time for each of its processes."""
    memory_gib: float = 1.0
    """Address space of each of its processes."""
    file_mib: float = 1.0
    """Size of each file that it writes, stdout and stderr included; its folder holds 8 times as
    much."""
    num_processes: int = 8
    """Processes and threads at a time, its own included; without namespaces, of this user."""
    hide: tuple[str, ...] = ()
    """Folders that look empty to it, one with the answers for instance; needs mount namespaces."""

    def __post_init__(self) -> None:
        numbers = (self.timeout_s, self.memory_gib, self.file_mib)
        if not all(0 < number <= MOST for number in numbers):
            raise ValueError(f"Limits: got {self}, need every number above 0, at most {MOST:g}.")
        whole("Limits.num_processes", self.num_processes, what="process")
        if isinstance(self.hide, str | os.PathLike):
            raise TypeError(f"hide: got {self.hide!r}, need a tuple of folders: ({self.hide!r},).")


@dataclass(frozen=True, kw_only=True, slots=True)
class Test:
    """One test of a program: what it gets, and what it must write."""

    stdin: str = ""
    """What the program reads."""
    then: str = ""
    """Python that runs after the program, in its process: ``print(add(1, 2))``."""
    stdout: str
    """What must be written; spaces at the ends of lines and empty lines at the end don't count."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a program on one test."""

    outcome: str
    """passed; failed (another output); error (it ended with an exception or by a signal);
    timeout."""
    stdout: str = ""
    """What it wrote, at most ``file_mib``."""
    stderr: str = ""
    """As much of its stderr: the traceback."""


def code_reward(
    prompt: str, response: str, answer: str, *, limits: Limits | None = None
) -> Verdict:
    """The share of tests that the response's program passes, 0 to 1.

    The program is the last block between ```` ``` ```` fences that is tagged as Python, else the
    last without a tag, else the whole response; one never closed counts if none of its kind is.
    ``answer`` is a JSON list of tests, ``[{"stdin": "1 2", "stdout": "3"}, ...]`` or ``[{"then":
    "print(add(1, 2))", "stdout": "3"}]``. The outcome is timeout or error if a test ended so: the
    fault is the program's, so the test counts as failed, not as NaN.
    """
    ran = run_tests(last_code_block(response), parse_tests(answer), limits=limits)
    outcomes = [each.outcome for each in ran]
    first = next((name for name in ("timeout", "error") if name in outcomes), "ok")
    return Verdict(outcomes.count("passed") / len(outcomes), first)


def run_tests(code: str, tests: Sequence[Test], *, limits: Limits | None = None) -> list[Ran]:
    """Run a program once for each test; after a timeout the rest counts as timeouts, unrun.

    Each run has a process of its own with limits on time, memory, file size and number of
    processes, an empty environment, a folder that is removed, and bounded output; when it ends, all
    that it started is killed. What a test expects never enters those processes. Where Linux allows
    namespaces (``isolation()`` says), it has no network, sees no other process, and finds every
    folder but its own read-only. Started by root it runs as another user, who may read what root
    may only if this Python lies in a folder of root's alone.

    An end to accidents, not a security boundary. It does not protect from: reading the files that
    this user may read, but for ``limits.hide``; faults of the kernel; a program that knows the
    tests' answers, or replaces what ``then`` calls; memory used by several processes together. What
    ``isolation()`` says False to it does not protect from, either: without namespaces, neither from
    the network, nor, unless started by root, from writing or deleting this user's files and killing
    this user's processes, this one included, nor from a process that leaves its session after
    killing those above it.
    """
    limits, ran = limits or Limits(), []
    _check_folders(limits.hide)
    for test in tests:
        stop = bool(ran) and ran[-1].outcome == "timeout"
        ran.append(Ran("timeout") if stop else _run(code, test, limits))
    return ran


def _run(code: str, test: Test, limits: Limits) -> Ran:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        Path(folder, "main.py").write_text(
            f"{code}\n{test.then}\n", encoding="utf-8", errors="replace"
        )
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(test.stdin.encode(errors="replace"))
        files[0].seek(0)
        file_bytes = math.ceil(limits.file_mib * 2**20)
        report = _supervise(
            _job(folder, [file.fileno() for file in files], limits, file_bytes), limits.timeout_s
        )
        for file in files:
            file.seek(0)
        out, err = (file.read(file_bytes).decode(errors="replace") for file in files[1:])
    if report is None:
        return Ran("error", out, err)
    exit_code = report["exit_code"]
    if exit_code is None or exit_code == -signal.SIGXCPU:
        return Ran("timeout", out, err)
    if exit_code != 0:
        return Ran("error", out, f"{err}\nexit {exit_code}".strip())
    return Ran("passed" if _lines(out) == _lines(test.stdout) else "failed", out, err)


def _check_folders(places: Sequence[str]) -> None:
    for place in places:
        if not os.path.isdir(place):
            raise ValueError(
                f"hide: got {place!r}, which is no folder on this machine, need folders that exist "
                "where the program runs."
            )


def _job(folder: str, fds: list[int], limits: Limits, file_bytes: int) -> dict[str, Any]:
    return {
        "folder": folder,
        "fds": fds,
        "timeout_s": limits.timeout_s,
        "cpu_s": math.ceil(limits.timeout_s),
        "memory_bytes": math.ceil(limits.memory_gib * 2**30),
        "file_bytes": file_bytes,
        "num_processes": limits.num_processes,
        "hide": [os.path.abspath(place) for place in limits.hide],
        "user": 20_000 + random.SystemRandom().randrange(40_000),
    }


def _supervise(job: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """The report of ``sandbox.py``; None if the program brought it down."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(SANDBOX), json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=job["fds"],
        env={},
        start_new_session=True,
    ) as process:
        try:
            report, errors = process.communicate(timeout=timeout_s + GRACE_S)
        except subprocess.TimeoutExpired:
            report, errors = b"", b""
        finally:  # after an interrupt, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if errors:
        raise RuntimeError(
            f"sandbox: got {errors.decode(errors='replace')[-2000:]}\nneed processes that can be "
            "limited. Run the program's tests on Linux, and look at rk.rewards.isolation()."
        )
    return json.loads(report) if report else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


_FENCE = re.compile(r"([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^`]*+)")  # indent, fence, tag


def last_code_block(text: str) -> str:
    """The last block tagged as Python between fences, else the last without a tag, else all of the
    text.

    Fences are CommonMark's: three or more ` or ~, closed by as many or more. A block loses its
    opening fence's indent; one never closed counts if none of its kind is.
    """
    found: dict[tuple[bool, bool], str] = {}  # (tagged, closed) -> the last such block
    opening, block = None, []
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            opening, block = fence, []
        elif fence and not fence[3] and fence[2].startswith(opening[2]):
            _keep(found, opening, block, closed=True)
            opening = None
        else:
            indent = len(line) - len(line.lstrip(" \t"))
            block.append(line[min(indent, len(opening[1])) :])
    if opening is not None and any(map(str.strip, block)):
        _keep(found, opening, block, closed=False)
    return found[max(found)] if found else text


def _keep(
    found: dict[tuple[bool, bool], str], opening: re.Match[str], block: list[str], *, closed: bool
) -> None:
    tag = opening[3].lower()
    if not tag or (tag.startswith("py") and not tag.startswith("pycon")):  # a console's transcript
        found[bool(tag), closed] = "\n".join([*block, ""] if closed else block)


def parse_tests(answer: str) -> list[Test]:
    """Tests of a JSON list of objects; ValueError says what is wrong with it."""
    try:
        tests = [Test(**each) for each in json.loads(answer)]
        texts = [value for test in tests for value in (test.stdin, test.then, test.stdout)]
    except (ValueError, TypeError) as error:
        tests, texts, got = [], [], f"{answer[:80]!r} ({error})"
    else:
        got = f"{answer[:80]!r}"
    if not tests or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"answer: got {got}, need a JSON list of at least one test, such as "
            '[{"stdin": "1 2", "stdout": "3"}], each with stdout and any of stdin and then.'
        )
    return tests


def isolation() -> dict[str, bool]:
    """What programs are kept from on this machine, as one in the sandbox finds it."""
    code = """
import os, socket, tempfile, time
def refused(call):
    try:
        call()
    except OSError:
        return True
    return False
def fork():
    for _ in range(16):
        if os.fork() == 0:
            time.sleep(60)
print(os.getppid() <= 1)
print(all(name == "lo" for _, name in socket.if_nameindex()))
print(refused(lambda: os.unlink(tempfile.mkstemp(dir="/tmp")[1])))
print(refused(fork), flush=True)
"""
    names = ("other processes", "network", "writing elsewhere", "processes without number")
    found = _run(code, Test(stdout=""), Limits(timeout_s=30))
    lines = found.stdout.split() or ["False"] * len(names)
    return {name: line == "True" for name, line in zip(names, lines, strict=True)}
