"""Every notebook: paired with its .py twin, stripped, small, and it runs."""

import json
import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import pytest
import quickstart
import sync_notebooks
from nbformat.v4 import new_code_cell, new_notebook, new_output

FOLDER = sync_notebooks.NOTEBOOKS
STEMS = sync_notebooks.stems(FOLDER)
FIRST = {"00_check_setup", "01_quickstart_grpo", "02_batch_and_shapes", "03_rewards"}
BUDGET_S = 300  # for a run that takes 20 s on two idle cores

each_notebook = pytest.mark.parametrize("stem", STEMS, ids=[stem.name for stem in STEMS])


def read(stem: Path) -> nbformat.NotebookNode:
    return nbformat.read(stem.with_suffix(".ipynb"), as_version=4)


def code_cells(stem: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in read(stem).cells if cell.cell_type == "code"]


def contents(notebook: nbformat.NotebookNode) -> list[tuple]:
    return [(c.cell_type, c.source, c.metadata.get("tags", [])) for c in notebook.cells]


def test_the_first_notebooks_exist():
    assert {stem.name for stem in STEMS} >= FIRST


@each_notebook
def test_twin_has_the_same_cells(stem):
    twin = jupytext.reads(stem.with_suffix(".py").read_text(encoding="utf-8"), fmt="py:percent")
    assert contents(twin) == contents(read(stem)), "run `make notebooks`"


@each_notebook
def test_stored_without_outputs_for_the_kernel_python3(stem):
    notebook = read(stem)
    assert notebook.metadata.kernelspec.name == "python3"
    assert [c.source for c in code_cells(stem) if c.outputs or c.execution_count] == []


@each_notebook
def test_is_small(stem):
    lines = [cell.source.splitlines() for cell in code_cells(stem)]
    assert len(lines) <= 25, "code cells"
    assert sum(map(len, lines)) <= 200, "lines of code"
    assert max(map(len, lines)) <= 30, "lines in one cell"


@each_notebook
def test_has_markdown_before_each_code_cell(stem):
    kinds = ["start", *(cell.cell_type for cell in read(stem).cells)]
    before_code = [first for first, second in pairwise(kinds) if second == "code"]
    assert set(before_code) == {"markdown"}


def check_run(stem: Path, sessions: set[int]) -> None:
    run = quickstart.run_notebook(stem.with_suffix(".ipynb"), timeout_s=BUDGET_S)
    sessions.add(run.session)
    assert run.failure is None, run.failure
    printed = [
        out.text
        for cell in run.notebook.cells
        if "raises-exception" not in cell.metadata.get("tags", [])
        for out in cell.get("outputs", [])
        if out.output_type == "stream" and out.name == "stderr"
    ]
    assert "Traceback" not in "".join(printed)


@pytest.mark.notebook
@each_notebook
def test_runs_in_a_fresh_kernel(stem, monkeypatch, nothing_left_running):
    if stem.name == "01_quickstart_grpo" and shutil.which("chromium"):
        pytest.skip("tests/test_browser.py runs it in JupyterLab, in full")
    monkeypatch.setenv("RLKIT_FAST", "1")
    check_run(stem, nothing_left_running)


@pytest.mark.slow
@each_notebook
def test_runs_in_full(stem, monkeypatch, nothing_left_running):
    monkeypatch.delenv("RLKIT_FAST", raising=False)
    check_run(stem, nothing_left_running)


def write(path: Path, **tagged: str) -> Path:
    """A notebook of one code cell a keyword, tagged by it."""
    cells = [new_code_cell(text, metadata={"tags": [tag]}) for tag, text in tagged.items()]
    nbformat.write(new_notebook(cells=cells), path)
    return path


TABLE = "import pandas\npandas.DataFrame({'step': [0], 'reward': [0.25]})"
PLOT = """%matplotlib inline
import matplotlib.pyplot as plt
_ = plt.plot([0, 1])"""


ACCURACY = "{'before': {'eval/accuracy': 0.2}, 'after': {'eval/accuracy': 0.95}}"


@pytest.mark.notebook
def test_a_saved_notebook_shows_the_dashboards_last_state_without_a_widget(tmp_path):
    cells = {
        "one": "import rlkit as rk\nlog = rk.MetricLog()\nboard = rk.viz.Dashboard(log)\nboard",
        "two": "for step in range(8):\n    log.add(step, reward=step / 8)\nboard.close()",
    }
    run = quickstart.run_notebook(write(tmp_path / "a.ipynb", **cells), timeout_s=120)
    assert run.failure is None, run.failure
    (output,) = run.notebook.cells[0].outputs
    assert ">7<" in output.data["text/html"]
    assert set(output.data) == {"text/plain", "text/html", "image/png"}


@pytest.mark.notebook
def test_quickstart_prints_the_table_and_saves_the_plot(tmp_path, capsys):
    tagged = {"table": TABLE, "reward-plot": PLOT, "held-out": ACCURACY}
    notebook = write(tmp_path / "a.ipynb", **tagged)
    assert quickstart.main(notebook, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "0.25" in printed
    assert "held-out accuracy  0.200 before training, 0.950 after" in printed
    assert str(tmp_path / "out" / "a.ipynb") in printed
    assert str(tmp_path / "out" / "reward.png") in printed
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.notebook
def test_quickstart_without_a_plot_says_which_cell_lacks_it(tmp_path, capsys):
    tagged = {"table": TABLE, "reward-plot": "x = 1", "held-out": ACCURACY}
    notebook = write(tmp_path / "a.ipynb", **tagged)
    assert quickstart.main(notebook, tmp_path / "out") == 1
    assert "'reward-plot'" in capsys.readouterr().err


@pytest.mark.notebook
def test_quickstart_names_the_cell_that_failed(tmp_path, capsys):
    notebook = write(tmp_path / "a.ipynb", one="x = 1", two="1 / 0", three="x = 2")
    assert quickstart.main(notebook, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "code cell 2 of 3 failed" in said
    assert "ZeroDivisionError: division by zero" in said
    assert str(tmp_path / "out" / "a.ipynb") in said
    counts = [c.execution_count for c in nbformat.read(tmp_path / "out" / "a.ipynb", 4).cells]
    assert counts == [1, 2, None]


@pytest.mark.notebook
def test_the_kernel_is_this_python_whatever_is_registered(tmp_path, monkeypatch):
    other = tmp_path / "kernels" / "python3"
    other.mkdir(parents=True)
    spec = {"argv": ["false"], "display_name": "other", "language": "python"}
    (other / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    source = "import os, sys\nprint(os.path.realpath(sys.prefix), os.getcwd())"
    run = quickstart.run_notebook(write(tmp_path / "a.ipynb", one=source), timeout_s=120)
    assert run.failure is None, run.failure
    text = run.notebook.cells[0].outputs[0].text
    assert text.split() == [os.path.realpath(sys.prefix), str(tmp_path)]


@pytest.mark.notebook
def test_a_notebook_over_its_time_is_stopped(tmp_path):
    notebook = write(tmp_path / "a.ipynb", one="import time\ntime.sleep(600)")
    run = quickstart.run_notebook(notebook, timeout_s=5)
    assert "code cell 1 of 1 failed" in run.failure
    assert "5 s" in run.failure


PERCENT = '# %% [markdown]\n# # A claim\n\n# %% tags=["table"]\n%time x = 1\n'


def test_sync_makes_the_missing_twin_and_then_changes_nothing(tmp_path):
    (tmp_path / "00_a.py").write_text(PERCENT)
    stem = tmp_path / "00_a"
    assert {p.suffix for p in sync_notebooks.sync(stem)} == {".py", ".ipynb"}
    assert contents(read(stem)) == [
        ("markdown", "# A claim", []),
        ("code", "%time x = 1", ["table"]),
    ]
    assert sync_notebooks.sync(stem) == []


def test_sync_strips_outputs_and_keeps_the_cells_changed_last(tmp_path):
    stem = tmp_path / "00_a"
    stem.with_suffix(".py").write_text(PERCENT)
    sync_notebooks.sync(stem)
    notebook = read(stem)
    cell = notebook.cells[1]
    cell.source, cell.execution_count = "x = 2", 7
    cell.outputs = [new_output("stream", text="hello")]
    nbformat.write(notebook, stem.with_suffix(".ipynb"))
    later_s = stem.with_suffix(".py").stat().st_mtime + 5
    os.utime(stem.with_suffix(".ipynb"), (later_s, later_s))
    sync_notebooks.sync(stem)
    assert "x = 2" in stem.with_suffix(".py").read_text()
    assert read(stem).cells[1].outputs == []
    assert read(stem).cells[1].execution_count is None
