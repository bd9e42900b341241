"""Checkpointer: saves a run between two steps, and puts it back."""

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlkit import trace
from rlkit.checkpoint import docks as dock_parts
from rlkit.checkpoint import driver, folder
from rlkit.checkpoint.folder import FORMAT, Saved
from rlkit.checkpoint.parts import check_parts, first_receipt, start_saving, store_of
from rlkit.checkpoint.rows import check_plain, read_batches, write_batches
from rlkit.checks import whole
from rlkit.dock import TransferDock, saving
from rlkit.metrics import MetricLog
from rlkit.tasks import PromptStream
from rlkit.workers.shards import read_json, write_json

_PART_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """One save, measured."""

    path: Path
    """Folder of the checkpoint."""
    step: int
    """Train step after which it was made."""
    seconds: float
    """Wall time, fsync and removal of old checkpoints included."""
    bytes: int
    """Size of all its files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What ``load`` found, beside what it put back into workers, prompts and log."""

    step: int | None = None
    """Train step after which the checkpoint was made; None: the folder has none."""
    batches: dict[str, Any] = field(default_factory=dict)
    """Batches in flight by name; a future came back as one that is done."""
    counters: dict[str, Any] = field(default_factory=dict)
    """Plain values by name."""

    @property
    def next_step(self) -> int:
        """The step to go on with: 0 for a new run."""
        return 0 if self.step is None else self.step + 1


class Checkpointer:
    """Checkpoints of one run in a folder, which all nodes of the cluster reach by the same path.

    A checkpoint has the workers' weights and optimizer state, policy version and place in the
    learning rate's schedule; position of the prompts; rows and counts of samples of batches in
    flight; metric log; counters; the driver's random states; the run's seed. Files are safetensors
    and JSON with a sha256 each, and nothing is unpickled. A checkpoint appears when all of it is
    on the disk. What was handed out and is neither trained nor named in ``batches`` is lost.

        checkpoint = rk.Checkpointer("runs/digits", best=lambda record: record["reward"])
        prompts, log = task.stream(size=32), rk.MetricLog()
        restored = checkpoint.load(workers={"actor": actor}, prompts=prompts, log=log)
        resharder.reshard()                                 # engines get their weights as always
        for step in range(restored.next_step, 100):
            ...
            checkpoint.save(step, workers={"actor": actor}, prompts=prompts, log=log)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep_last: int = 2,
        best: Callable[[Mapping[str, Any]], float | None] | None = None,
    ) -> None:
        """Keeps the newest ``keep_last``, and the one for which ``best(record)`` was highest.

        ``record`` is the log's record of the step; None or NaN: not a candidate.
        """
        self.path, self.best = Path(path).absolute(), best
        self.keep_last = whole("keep_last", keep_last, what="checkpoint")
        folder.check(self.path)
        self._ours = False  # whether what is in the folder is this run's

    # ---- saving ----

    def save(
        self,
        step: int,
        *,
        workers: Mapping[str, Any],
        prompts: PromptStream | None = None,
        log: MetricLog | None = None,
        batches: Mapping[str, Any] | None = None,
        docks: Mapping[str, TransferDock] | None = None,
        counters: Mapping[str, Any] | None = None,
    ) -> SaveReport:
        """Save the run after ``step``, as it is now; an error leaves earlier checkpoints as they
        were.

        workers: groups by name (actor, critic) whose state training goes on from. batches: by name,
        what was generated, or is being generated, and is not trained yet. docks: by name; rows that
        are leased are offered again after loading, those acknowledged are not.
        """
        start = time.perf_counter()
        parts = {"workers": workers, "batches": batches or {}, "docks": docks or {}}
        self._check_save(step, parts)
        content = {
            "format": FORMAT,
            "step": step,
            "score": self._score(step, log),
            "prompts": None if prompts is None else prompts.save_state(),
            "counters": dict(counters or {}),
        }
        check_plain("counters", content["counters"])
        check_plain("prompts", content["prompts"])
        with trace.current().span("checkpoint"), trace.labelled("checkpoint/parts"):
            try:
                saved = self._write(content, parts, log)
            except OSError as error:
                if error.errno is None:  # one of rlkit's own, which explains itself
                    raise
                raise self._explained(error, step) from error
        self._ours = True
        size = sum(file.stat().st_size for file in saved.rglob("*") if file.is_file())
        seconds = time.perf_counter() - start
        return SaveReport(path=saved, step=step, seconds=seconds, bytes=size)

    def _write(self, content: dict[str, Any], parts: Mapping[str, Any], log: Any) -> Path:
        with folder.locked(self.path):
            folder.remove_left_overs(self.path)
            with folder.appearing(self.path, content["step"]) as partial:
                files = {"": write_json(partial / "random.json", driver.random_state())}
                if log is not None:
                    files[""] |= write_json(partial / "log.json", driver.log_state(log))
                running = start_saving(partial / "workers", parts["workers"])
                with saving.all_frozen(parts["docks"].values()):
                    content["docks"], rows = dock_parts.parts_of(parts["docks"])
                    rows = {**parts["batches"], **rows}
                    content["batches"], more = write_batches(partial / "batches", rows)
                files |= more
                for name, future in running.items():
                    files[f"workers/{name}"] = first_receipt(name, future.result())
                content["workers"] = list(running)
                content["files"] = {
                    f"{at}/{name}" if at else name: facts
                    for at, receipt in files.items()
                    for name, facts in receipt.items()
                }
                folder.write_index(partial, content)
            every = folder.saved(self.path)
            folder.remove(self.path, [one for one in every if one not in self._kept(every)])
        return every[-1].path

    def _check_save(self, step: int, parts: Mapping[str, Mapping[str, Any]]) -> None:
        folder.check(self.path)
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step: got {step!r}, need the number of the train step, an int >= 0.")
        for kind, named in parts.items():
            odd = [name for name in named if not _PART_NAME.fullmatch(name)]
            if odd:
                raise ValueError(
                    f"{kind}: got the name {odd[0]!r}, need letters, digits, _ and - only: it "
                    "becomes a folder's name."
                )
        for name, group in parts["workers"].items():
            if "save_state" not in getattr(group, "methods", {}):
                raise TypeError(
                    f"workers[{name!r}]: got {group!r}, need a worker group whose workers have "
                    "save_state and load_state, such as actors. Rollout and reference workers "
                    "have nothing to save."
                )
        found = [] if self._ours else folder.saved(self.path)
        if found:
            raise ValueError(
                f"{self.path}: has checkpoints of another run, of steps {_steps(found)}, which "
                "saving would push out. Call load() first to go on from them, or use another "
                "folder."
            )

    def _score(self, step: int, log: MetricLog | None) -> float | None:
        """How good the step was, for keeping the best."""
        if self.best is None:
            return None
        record = log.records[-1] if log is not None and log.records else {}
        if record.get("step") != step:
            raise ValueError(
                f"best: got {'no log' if log is None else 'a log'} without a last record of step "
                f"{step}, need it. Pass log= and call log.add({step}, ...) before saving."
            )
        value = self.best(record)
        return None if value is None or math.isnan(value) else float(value)

    def _kept(self, every: list[Saved]) -> list[Saved]:
        """The newest and the best."""
        rated = [(_score_of(one), one) for one in every] if self.best else []
        best = max((s for s, _ in rated if s is not None), default=None)
        kept = [one for score, one in rated if score is not None and score == best]
        return [*every[-self.keep_last :], *kept[:1]]

    def _explained(self, error: OSError, step: int) -> OSError:
        free = shutil.disk_usage(self.path).free / 2**30 if self.path.is_dir() else 0.0
        return OSError(
            error.errno,
            f"checkpoint of step {step} could not be written: {error.strerror}. {self.path} has "
            f"{free:.2f} GiB free; its earlier checkpoints, of steps "
            f"{_steps(folder.saved(self.path))}, are intact. Free space, or use another folder.",
        )

    # ---- loading ----

    def load(
        self,
        *,
        workers: Mapping[str, Any],
        prompts: PromptStream | None = None,
        log: MetricLog | None = None,
        docks: Mapping[str, TransferDock] | None = None,
        step: int | None = None,
    ) -> Restored:
        """Put the newest checkpoint, or that of ``step``, back into the parts given.

        An empty folder changes nothing and returns ``Restored()``, whose ``next_step`` is 0. All
        files are compared with their sha256 before anything is changed. Engines get the weights
        with the next ``resharder.reshard()``.
        """
        folder.check(self.path)
        every = folder.saved(self.path)
        if step is not None and step not in [one.step for one in every]:
            raise ValueError(f"load: got step={step}, need one of steps {_steps(every)}.")
        if not every:
            self._ours = True
            return Restored()
        saved = [one for one in every if step in (None, one.step)][-1]
        content = saved.index()
        check_parts(saved, content, workers=workers, prompts=prompts, log=log, docks=docks or {})
        saved.verify(content["files"])
        with trace.current().span("checkpoint"), trace.labelled("checkpoint/parts"):
            loading = {
                name: group.submit.load_state(str(saved.path / "workers" / name))
                for name, group in workers.items()
            }
            for future in loading.values():
                future.result()
            store = store_of(workers)
            batches = read_batches(saved.path / "batches", content["batches"], store=store)
            dock_parts.put_back(docks or {}, content["docks"], batches)
        if prompts is not None:
            prompts.load_state(content["prompts"])
        if log is not None:
            driver.set_log_state(log, read_json(saved.path / "log.json"))
        driver.set_random_state(read_json(saved.path / "random.json"))
        self._ours = True
        return Restored(step=saved.step, batches=batches, counters=content["counters"])

    def frame(self) -> Any:
        """DataFrame, a row a checkpoint, oldest first: step, score, bytes, path."""
        import pandas as pd

        rows = [
            {
                "step": one.step,
                "score": _score_of(one),
                "bytes": sum(f.stat().st_size for f in one.path.rglob("*") if f.is_file()),
                "path": str(one.path),
            }
            for one in folder.saved(self.path)
        ]
        return pd.DataFrame(rows, columns=["step", "score", "bytes", "path"])

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.path)!r}, steps {_steps(folder.saved(self.path))})"


def _score_of(saved: Saved) -> float | None:
    """The score in an index; None if the index can't be read."""
    try:
        return saved.index()["score"]
    except (OSError, ValueError):
        return None


def _steps(found: list[Saved]) -> list[int]:
    return [one.step for one in found]
