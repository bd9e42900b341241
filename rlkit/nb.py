"""Helpers of notebooks: the first cell, full and short runs, loops that buttons can stop."""

import ast
import dataclasses
import inspect
import os
import platform
import random
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from importlib import metadata
from itertools import pairwise
from typing import Any, TypeVar

T = TypeVar("T")


def setup(seed: int = 0) -> None:
    """First cell of a notebook: seed Python, NumPy and torch, print one line of versions."""
    import numpy as np
    import pandas as pd
    import torch

    from rlkit import device

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (users' cells may draw from the global generator)
    torch.manual_seed(seed)
    pd.set_option("display.width", 160)  # a table of a dozen columns stays in one piece as text
    keep_no_handles()
    kind = device.platform("auto").kind
    print(
        f"rlkit {metadata.version('rlkit')}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {device.num_devices(kind)} x {kind}, seed {seed}"
    )


class Shown:
    """Stands in IPython's history (``Out``, ``_``) for a displayed handle, not keeping it alive."""

    def __init__(self, value: Any) -> None:
        self._value, self._text = weakref.ref(value), repr(value)

    def __getattr__(self, name: str) -> Any:
        value = self._value()
        if value is None:
            raise ReferenceError(
                f"{self._text} was displayed but not kept, so that its rows could be freed. "
                "Give it a name in the cell that makes it."
            )
        return getattr(value, name)

    def __repr__(self) -> str:
        return self._text + ("" if self._value() is not None else " (freed)")


def keep_no_handles() -> None:
    """In IPython: displaying a batch or column as a cell's result doesn't pin its rows."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or getattr(shell, "_rlkit_keeps_no_handles", False):
        return
    shell._rlkit_keeps_no_handles = True
    shell.events.register("post_run_cell", lambda result: _release(shell, result))


def _release(shell: Any, result: Any) -> None:
    """Put stand-ins where the history holds handles."""
    from rlkit.batch import Batch
    from rlkit.batch.store import Column

    def swap(value: Any) -> Any:
        return Shown(value) if isinstance(value, Batch | Column) else value

    history = shell.user_ns.get("_oh", {})
    for number, value in list(history.items()):
        history[number] = swap(value)
    for space in (shell.user_ns, shell.user_ns_hidden):
        for name in [n for n in space if n.startswith("_") and n.strip("_0123456789") == ""]:
            space[name] = swap(space[name])
    for name in ("_", "__", "___"):
        setattr(shell.displayhook, name, swap(getattr(shell.displayhook, name, None)))
    result.result = swap(result.result)


def fields(cls: type) -> Any:
    """DataFrame of a dataclass's fields, which ``help`` leaves out: name, default, meaning.

    Of configs, ``rk.Layout``, ``rk.ModelSpec``, ``rk.sim.Run``; the meaning is the docstring under
    a field.
    """
    import pandas as pd

    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"fields: got {cls!r}, need a dataclass such as rk.sim.Run.")
    said: dict[str, str] = {}
    for each in [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(each)))
        for field, text in pairwise(tree.body[0].body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                said[ast.unparse(field.target)] = " ".join(
                    str(ast.literal_eval(text.value)).split()
                )
    rows = [(f.name, _default(f), said.get(f.name, "")) for f in dataclasses.fields(cls)]
    return pd.DataFrame(rows, columns=["name", "default", "meaning"])


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory())
    return "needed" if field.default is dataclasses.MISSING else repr(field.default)


def fast() -> bool:
    """Whether the short form of a notebook runs (``RLKIT_FAST=1``: tests)."""
    return os.environ.get("RLKIT_FAST", "0") not in ("", "0")


def pick(full: T, *, ci: T) -> T:
    """``full`` for a reader, ``ci`` when ``RLKIT_FAST=1``: the same notebook with less work."""
    return ci if fast() else full


class Background:
    """A loop in a thread of its own, so that the kernel stays free.

    Pause, step, stop work while it runs.
    """

    def __init__(self, loop: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        self.steps = 0
        self.error: BaseException | None = None
        self._go, self._one, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._go.set()
        self._thread = threading.Thread(
            target=self._run, args=(loop,), daemon=True, name="rlkit-loop"
        )
        self._thread.start()

    def _run(self, loop: Iterable[Any] | Callable[[], Iterable[Any]]) -> None:
        try:
            for _ in loop() if callable(loop) else loop:
                self.steps += 1
                while not (self._go.is_set() or self._stop.is_set() or self._one.is_set()):
                    time.sleep(0.02)
                self._one.clear()
                if self._stop.is_set():
                    return
        except BaseException as error:
            self.error = error
            self._text = traceback.format_exc()

    def pause(self) -> None:
        """Stop after the step that runs."""
        self._go.clear()

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def step(self) -> None:
        """While paused, do one step more."""
        self._one.set()

    def stop(self, *, timeout_s: float = 60.0) -> None:
        """End after the step that runs, and wait for that."""
        self._stop.set()
        self.wait(timeout_s=timeout_s)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for the end; an error of the loop is raised here."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"background loop: still in step {self.steps} after {timeout_s:.0f} s. Wait "
                "longer, or stop()."
            )
        if self.error is not None:
            raise self.error

    @property
    def state(self) -> str:
        """running, paused, done or failed."""
        if self._thread.is_alive():
            return "running" if self._go.is_set() else "paused"
        return "done" if self.error is None else "failed"

    def __repr__(self) -> str:
        more = "" if self.error is None else f", {type(self.error).__name__}: {self.error}"
        return f"Background({self.state}, {self.steps} steps{more})"


def background(loop: Iterable[Any] | Callable[[], Iterable[Any]]) -> Background:
    """Run a generator (or a function that makes one), which yields once a step, off the kernel's
    main thread.
    """
    return Background(loop)
