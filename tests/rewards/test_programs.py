"""Programs of every kind against tests: outcomes, limits, and nothing left running."""

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.rewards import Limits, Test, code_reward, isolation, programs, run_tests

Test.__test__ = False  # pytest would collect it

SHORT = Limits(timeout_s=0.5)  # of what runs out of time, or may
LONG = Limits(timeout_s=60)  # for a loaded machine
ISOLATION = isolation()
needs_namespaces = pytest.mark.skipif(not ISOLATION["network"], reason="no namespaces here")


@pytest.fixture(autouse=True)
def nothing_left(nothing_left_running):
    yield
    running = [p.cmdline() for p in psutil.Process().children(recursive=True)]
    assert not [command for command in running if "sandbox.py" in " ".join(command)]


def ran(code, stdout="", *, limits=LONG, **test):
    return run_tests(code, [Test(stdout=stdout, **test)], limits=limits)[0]


def running(mark: str) -> bool:
    """Whether a process has ``mark`` in its command line."""
    return any(mark in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def within_20_s(condition) -> bool:
    deadline_s = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


# ---- outcomes ----


@pytest.mark.parametrize(
    ("code", "test", "outcome"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", {"stdin": "1 2"}, "passed"),
        ("def add(a, b):\n    return a + b", {"then": "print(add(1, 2))"}, "passed"),
        ("print('3  ')\nprint()", {}, "passed"),
        ("print(4)", {}, "failed"),
        ("pass", {}, "failed"),
        ("1 / 0", {}, "error"),
        ("def f(:", {}, "error"),
        ("print(3)\nraise SystemExit(1)", {}, "error"),
        ("print(3)\nimport os\nos.abort()", {}, "error"),
        ("print(input())", {}, "error"),
        ("\ud800", {}, "error"),
        ("print(3)\nimport sys\nsys.stdout.buffer.write(b'\\xff')", {}, "failed"),
    ],
)
def test_a_program_passes_fails_or_errs(code, test, outcome):
    assert ran(code, "3", **test).outcome == outcome


def test_the_traceback_is_kept():
    assert "ZeroDivisionError" in ran("1 / 0").stderr


def test_output_of_any_bytes_is_text():
    assert ran(r"import sys; sys.stdout.buffer.write(b'\xff<script>')").stdout == "�<script>"


def test_the_reward_is_the_share_of_tests_passed():
    tests = [{"stdin": f"{n}", "stdout": f"{n * n}"} for n in (0, 1, 2, 3)]
    response = "So:\n```python\nx = 0\n```\nno:\n```python\nn = int(input())\nprint(n + n)\n```\n"
    verdict = code_reward("", response, json.dumps(tests), limits=LONG)
    assert (verdict, verdict.outcome) == (0.5, "ok")  # 0 + 0 = 0 * 0 and 2 + 2 = 2 * 2


@pytest.mark.parametrize(
    ("code", "outcome"), [("while True: pass", "timeout"), ("1 / 0", "error"), ("print(3)", "ok")]
)
def test_the_outcome_of_a_reward_tells_timeouts_and_errors_apart(code, outcome):
    limits = SHORT if outcome == "timeout" else LONG
    verdict = code_reward("", code, '[{"stdout": "3"}]', limits=limits)
    assert (verdict, verdict.outcome) == (float(outcome == "ok"), outcome)


def test_after_a_timeout_the_other_tests_are_not_run():
    tests = [Test(stdout="")] * 200
    start_s = time.monotonic()
    found = run_tests("while True: pass", tests, limits=SHORT)
    assert [each.outcome for each in found] == ["timeout"] * 200
    assert time.monotonic() - start_s < 60  # all of them take 100 s


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("a\n```python\nprint(1)\n```\nb", "print(1)\n"),
        ("```\nx\n```\n```py\ny\n```", "y\n"),
        ("```python\nnever closed", "never closed"),
        ("So:\n```python\nprint(1)", "print(1)"),
        ("```\nx\n```\n```python\ncut off", "cut off"),
        ("```python3\nx\n```", "x\n"),
        ("```Python title=a\nx\n```", "x\n"),
        ("````python\nx = 1\n```\ny\n````", "x = 1\n```\ny\n"),
        ("~~~py\nx\n~~~", "x\n"),
        ("1. so\n   ```python\n   if x:\n     y\n\n   ```", "if x:\n  y\n\n"),
        ("```python\nx\n```\nprints\n```\n3\n```", "x\n"),
        ("```python\nx\n```\n```pycon\n>>> x\n```", "x\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("print('```x```')", "print('```x```')"),
        ("``` python\n``` in text\n```\n", "``` in text\n"),
        ("```json\n{}\n```\nso\n```python\nx\n```", "x\n"),
        ("```python\nx\n```\nprints\n```text\n3\n```", "x\n"),
        ("```python\nx\n```\n```python\ncut off", "x\n"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block(text, code):
    assert programs.last_code_block(text) == code


def test_a_flood_of_fences_is_read_in_linear_time():
    assert programs.last_code_block("```python\n" * 200_000 + "```") == "```python\n" * 199_999
    for flood in (" " * 200_000, "~" * 200_000 + "`", "`" * 200_000 + "a`"):
        assert programs.last_code_block(flood) == flood


@given(st.text(alphabet="ab`\n ", max_size=60))
def test_a_fenced_program_is_found_after_any_prose_without_fences(prose):
    prose = prose.replace("```", "")
    assert programs.last_code_block(f"{prose}\n```python\nx = 1\n```\n") == "x = 1\n"


@pytest.mark.parametrize(
    "answer", ["", "3", "[]", "{}", '["3"]', '[{"stdin": "1"}]', '[{"stdout": 3}]', '[{"x": "3"}]']
)
def test_an_answer_that_is_no_list_of_tests_is_an_error(answer):
    with pytest.raises(ValueError, match="need a JSON list of at least one test"):
        code_reward("", "print(3)", answer)


@pytest.mark.parametrize(
    "limit",
    [{"timeout_s": 0}, {"memory_gib": -1}, {"timeout_s": math.inf}, {"memory_gib": math.nan},
     {"file_mib": 1e10}],
)  # fmt: skip
def test_limits_are_above_zero_and_what_the_system_can_hold(limit):
    with pytest.raises(ValueError, match=r"need every number above 0, at most 1e\+06"):
        Limits(**limit)


@pytest.mark.parametrize("number", [0, 1.5, math.inf])
def test_processes_are_counted(number):
    with pytest.raises((ValueError, TypeError), match=r"num_processes: got .* at least 1 process"):
        Limits(num_processes=number)


def test_hidden_folders_are_a_tuple_of_folders_that_exist(tmp_path):
    with pytest.raises(TypeError, match=r"hide: got '/home', need a tuple .*\('/home',\)"):
        Limits(hide="/home")
    with pytest.raises(ValueError, match=r"hide: got .*nowhere', which is no folder"):
        ran("print(3)", limits=Limits(hide=(str(tmp_path / "nowhere"),)))


@settings(max_examples=15, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_a_program_that_prints_a_text_passes_the_test_that_wants_it(text):
    assert ran(f"print({text!a}, end='')", text).outcome == "passed"


# ---- limits ----


def test_an_infinite_loop_is_a_timeout():
    assert ran("while True: pass", limits=SHORT).outcome == "timeout"


def test_a_program_that_sleeps_is_a_timeout():
    assert ran("import time; time.sleep(600)", limits=SHORT).outcome == "timeout"


def test_threads_share_the_time_of_the_processor():
    code = """
import threading
for _ in range(3):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)]).start()
"""
    assert ran(code, limits=SHORT).outcome == "timeout"


def test_ten_gigabytes_are_an_error():
    found = ran("x = b'x' * (10 << 30)\nprint(3)", "3")
    assert found.outcome == "error"
    assert "MemoryError" in found.stderr


def test_a_billion_bytes_printed_are_an_error_and_a_mebibyte_is_kept():
    code = "import os\nfor _ in range(10**6): os.write(1, b'x' * 1000)"
    found = ran(code)
    assert found.outcome == "error"
    assert len(found.stdout) == 2**20


def test_a_billion_bytes_printed_whatever_happens_are_cut_off():
    code = "import os\nwhile True:\n  try: os.write(2, b'x' * 1000)\n  except OSError: break"
    assert len(ran(code).stderr) == 2**20


def test_limits_above_those_of_this_process_are_cut_to_them():
    code = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[1] <= 64)"
    assert ran(code, "True", limits=Limits(timeout_s=60, num_processes=1 << 40)).outcome == "passed"


def test_a_file_has_a_limit():
    found = ran("f = open('x', 'wb')\nfor _ in range(9): f.write(b'x' * 2**18)\nf.close()")
    assert "File too large" in found.stderr


@pytest.mark.skipif(not ISOLATION["processes without number"], reason="forking has no limit here")
def test_a_fork_bomb_ends():
    code = "import os\nwhile True:\n  try: os.fork(); os.setsid()\n  except OSError: pass"
    assert ran(code, limits=SHORT).outcome in ("timeout", "error")
    before = len(psutil.pids())
    time.sleep(0.5)
    assert len(psutil.pids()) <= before + 20  # others' come and go; a bomb's are thousands


def test_killing_the_parent_brings_nothing_down():
    code = "import os\nos.kill(os.getppid(), 9)\nprint(3)"
    assert ran(code, "3").outcome in ("passed", "error")  # ignored, refused, or it ends itself
    assert ran("print(3)", "3").outcome == "passed"


@pytest.mark.parametrize("target", [0, pytest.param(-1, marks=needs_namespaces)])
def test_killing_all_it_can_brings_nothing_else_down(target):  # -1 elsewhere: all of this user's
    found = ran(f"import os\nos.kill({target}, 9)\nimport time; time.sleep(9)", limits=SHORT)
    assert found.outcome in ("error", "timeout")
    assert ran("print(3)", "3").outcome == "passed"


def test_what_a_program_starts_ends_with_it(tmp_path):
    code = f"""
import os, subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(600)", {str(tmp_path)!r}]
subprocess.Popen(command, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    os.execv(sys.executable, command)
print(3)
"""
    # Without namespaces the limit counts all processes of this user.
    assert ran(code, "3", limits=Limits(timeout_s=60, num_processes=100_000)).outcome == "passed"
    assert within_20_s(lambda: not running(str(tmp_path)))


def test_a_program_ends_with_the_process_that_waits_for_it():
    code = """
from rlkit.rewards import Limits, Test, run_tests
program = "import os, sys; os.execv(sys.executable, ['python', '-c', {!r}, 'rlkit' + '-mark'])"
program = program.format("import time; time.sleep(600)")
run_tests(program, [Test(stdout="")], limits=Limits(timeout_s=120))
"""
    waiting = subprocess.Popen([sys.executable, "-c", code])
    assert within_20_s(lambda: running("rlkit-mark"))
    waiting.kill()
    waiting.wait()
    assert within_20_s(lambda: not running("rlkit-mark"))


def test_programs_may_run_at_the_same_time():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: ran(f"print({n})", f"{n}").outcome, range(12)))
    assert found == ["passed"] * 12


def test_the_folder_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os\nos.mkdir('a'); open('a/b', 'w').write('x'); os.chmod('a', 0); print(3)"
    assert ran(code, "3").outcome == "passed"
    assert list(tmp_path.iterdir()) == []


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    assert "hunter2" not in ran("import os; print(os.environ)").stdout


SEARCH = """
import glob, os, sys
seen = [repr(sys.argv), repr(dict(os.environ))]
places = glob.glob("**", recursive=True) + glob.glob("../*json") + sys.argv
for pid in ("self", os.getppid(), 1):
    places += [f"/proc/{pid}/{name}" for name in ("environ", "cmdline")]
    places += glob.glob(f"/proc/{pid}/fd/*")
for place in places:
    try:
        if not place.endswith(("fd/0", "fd/1", "fd/2")):
            seen.append(open(place, errors="replace").read())
    except (OSError, ValueError):
        pass
print("found" if "forty" + "two" in "".join(seen) else "nothing")
"""


def test_what_a_test_expects_is_nowhere_a_program_looks():
    assert ran(SEARCH, "fortytwo").stdout == "nothing\n"


@needs_namespaces
def test_the_answer_file_can_be_hidden(tmp_path):
    answers = tmp_path / "answers.json"
    answers.write_text("fortytwo")
    tmp_path.chmod(0o755)
    code = f"print(open({str(answers)!r}).read())"
    found = ran(code, "fortytwo", limits=Limits(timeout_s=60, hide=(str(tmp_path),)))
    assert found.outcome == "error"
    assert "fortytwo" not in found.stdout
    assert answers.read_text() == "fortytwo"


@needs_namespaces
def test_files_elsewhere_can_not_be_written(tmp_path):
    path = tmp_path / "x"
    path.write_text("kept")
    path.chmod(0o666)
    code = f"import os\nos.unlink({str(path)!r})"
    assert ran(code).outcome == "error"
    assert path.read_text() == "kept"


@needs_namespaces
def test_there_is_no_network():
    code = """
import socket
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError as error:
    print(error.errno == 101)  # unreachable: not even a loopback that is up
"""
    assert ran(code).stdout == "True\n"


@needs_namespaces
def test_other_processes_are_not_seen():
    assert ran(f"import os; os.kill({os.getpid()}, 0)").outcome == "error"


# ---- where the kernel refuses namespaces ----


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The sandbox on a kernel that grants no namespaces."""
    script = tmp_path / "sandbox.py"
    script.write_text(
        "import importlib.util, json, sys\n"
        f"spec = importlib.util.spec_from_file_location('sandbox', {str(programs.SANDBOX)!r})\n"
        "sandbox = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(sandbox)\n"
        "sandbox.isolate = lambda job: False\n"
        "sandbox.main(json.loads(sys.argv[1]))\n"
    )
    monkeypatch.setattr(programs, "SANDBOX", script)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print(3)", "passed"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(600)", "timeout"),
        ("x = b'x' * (10 << 30)", "error"),
        ("import os; os.kill(os.getppid(), 9); print(3)", "error"),
        ("import os; os.kill(0, 9)", "error"),
    ],
)
def test_without_namespaces_limits_hold(refused, code, outcome):
    assert not isolation()["network"]
    limits = SHORT if outcome == "timeout" else LONG
    assert ran(code, "3", limits=limits).outcome == outcome


def test_without_namespaces_what_a_program_starts_ends_with_it(refused, tmp_path):
    test_what_a_program_starts_ends_with_it(tmp_path / "mark")


def test_without_namespaces_nothing_can_be_hidden_and_that_is_said(refused, tmp_path):
    with pytest.raises(RuntimeError, match="need mount namespaces, which are refused here"):
        ran("print(3)", limits=Limits(timeout_s=60, hide=(str(tmp_path),)))
