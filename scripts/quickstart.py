"""Run the quickstart notebook headless, print its table, save the notebook and its reward plot.

`make quickstart` calls this with the Python of `.venv`; the notebook's kernel runs on the same one.
"""

import base64
import os
import re
import sys
import time
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_quickstart_grpo.ipynb"
OUT = ROOT / "build" / "quickstart"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class _ThisPython(KernelSpecManager):
    """Knows one kernel, this very Python, whatever kernels the user has registered."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv.append("--log-level=ERROR")
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


@dataclass(frozen=True, kw_only=True, slots=True)
class NotebookRun:
    """A notebook after its run: with outputs up to the cell that failed, if one did."""

    notebook: NotebookNode
    """The executed notebook."""
    failure: str | None
    """None, or which cell failed and the last lines of its traceback."""
    session: int
    """Session id of the kernel and of every process it started, Ray's among them."""


def run_notebook(
    path: Path, *, timeout_s: float, progress: Callable[[str], None] | None = None
) -> NotebookRun:
    """Execute a notebook in a fresh kernel of this Python, in the notebook's own folder.

    All cells together may take `timeout_s`. Cells tagged `raises-exception` may fail.
    `progress` gets a piece of text when a code cell starts and when it ends.
    """
    notebook = nbformat.read(path, as_version=4)
    code_cells = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    say = progress or (lambda text: None)
    started_s = time.monotonic()
    cell_started_s = started_s
    number = session = 0

    def on_execute(cell: NotebookNode, cell_index: int) -> None:
        nonlocal cell_started_s, number, session
        session = kernel.provisioner.pid  # jupyter_client makes each kernel a session leader
        cell_started_s = time.monotonic()
        number = code_cells.index(cell_index) + 1
        say(f"[{number:2d}/{len(code_cells)}] {_title(notebook.cells, cell_index):60s}")

    def on_executed(cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        say(f" {time.monotonic() - cell_started_s:6.1f} s\n")

    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=_ThisPython())
    client = NotebookClient(
        notebook,
        km=kernel,
        timeout_func=lambda cell: max(1, int(timeout_s - (time.monotonic() - started_s))),
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_execute=on_execute,
        on_cell_executed=on_executed,
    )
    failure = None
    try:
        client.execute(cleanup_kc=True)  # else a kernel manager of ours is left running
    except CellExecutionError as error:
        failure = ANSI.sub("", error.traceback)
    except CellTimeoutError:
        failure = f"still running after {timeout_s:.0f} s, the time this notebook may take"
    except DeadKernelError:
        failure = "the kernel died; out of memory is the usual cause"
    except AssertionError:
        if client.km is not None:
            raise
        failure = "stopped by Ctrl-C"  # nbclient ends the kernel, then trips over its own clean-up
    if failure is not None:
        lines = "\n  ".join(failure.strip().splitlines()[-12:])
        failure = f"code cell {number} of {len(code_cells)} failed:\n  {lines}"
    return NotebookRun(notebook=notebook, failure=failure, session=session)


def _title(cells: list[NotebookNode], index: int) -> str:
    """What a code cell does: first line of the markdown before it, or else of its code."""
    before = cells[index - 1] if index else cells[index]
    source = before.source if before.cell_type == "markdown" else cells[index].source
    line = next(iter(source.strip().splitlines()), "")
    return line.lstrip("# ")[:60]


def tagged_output(notebook: NotebookNode, *, tag: str, mime: str) -> str:
    """The output of type `mime` of the cell tagged `tag`; ValueError where there is none."""
    tagged = [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]
    data = [out.data for cell in tagged for out in cell.get("outputs", []) if "data" in out]
    found = [each[mime] for each in data if mime in each]
    if not found:
        raise ValueError(
            f"cell tagged {tag!r}: got {len(tagged)} such cells and outputs of types "
            f"{sorted({key for each in data for key in each})}, need one output of type {mime}. "
            "End that cell in an expression that shows it."
        )
    return found[-1]


def main(notebook: Path = NOTEBOOK, out: Path = OUT) -> int:
    """Run `notebook`, write its executed copy and `reward.png` to `out`, print its table."""
    if not notebook.exists():
        print(f"{notebook}: no such notebook. Run this from a full checkout.", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    executed, plot = out / notebook.name, out / "reward.png"
    print(f"Running {_shown(notebook)} in a fresh kernel:")
    run = run_notebook(
        notebook, timeout_s=1800, progress=lambda text: print(text, end="", flush=True)
    )
    nbformat.write(run.notebook, executed)
    failure, table, accuracy = run.failure, "", {}
    if failure is None:
        try:
            table = tagged_output(run.notebook, tag="table", mime="text/plain")
            text = tagged_output(run.notebook, tag="held-out", mime="text/plain")
            accuracy = {when: each["eval/accuracy"] for when, each in literal_eval(text).items()}
            image = tagged_output(run.notebook, tag="reward-plot", mime="image/png")
            plot.write_bytes(base64.b64decode(image))
        except ValueError as error:
            failure = str(error)
    if failure is not None:
        print(f"\n{_shown(notebook)}: {failure}", file=sys.stderr)
        print(f"The notebook as far as it ran: {_shown(executed)}", file=sys.stderr)
        return 1
    print(
        f"\n{table}\n\nheld-out accuracy  {accuracy['before']:.3f} before training, "
        f"{accuracy['after']:.3f} after"
    )
    print(f"reward plot        {_shown(plot)}\nexecuted notebook  {_shown(executed)}")
    return 0


def _print_now(text: str) -> None:
    print(text, end="", flush=True)


def _shown(path: Path) -> str:
    """The path as the user would type it: relative to where they are, if below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
