"""Where else a log's records go: callbacks for ``log.listen``, one call a record.

    log.listen(rk.exporters.tensorboard("runs/1"))

A callback is any function ``(log) -> None`` that reads ``log.records[-1]``; writing your own takes
no class. These two also close: by ``close()``, at the end of a ``with``, or when Python ends.
"""

import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.metrics import MetricLog


class Exporter:
    """A callback that writes the newest record of a log, until it is closed."""

    def __init__(
        self,
        write: Callable[[Mapping[str, Any]], None],
        close: Callable[[], None],
        *,
        at_exit: bool = True,
    ) -> None:
        self._write, self._end = write, weakref.finalize(self, close)
        self._end.atexit = at_exit

    def close(self) -> None:
        """Write what is left and end; a second call does nothing."""
        self._end()

    def __call__(self, log: MetricLog) -> None:
        """Write the newest record."""
        if not self._end.alive:
            raise RuntimeError(
                "exporter: it was closed, need an open one. Stop listening first: call what "
                "log.listen(...) returned."
            )
        self._write(log.records[-1])

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def tensorboard(folder: str | os.PathLike[str]) -> Exporter:
    """Write event files that TensorBoard shows: numbers as scalars, strings as text.

    Look at them with ``tensorboard --logdir folder``.
    """
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError as error:
        raise _absent("tensorboard", error) from error
    writer = SummaryWriter(os.fspath(folder))

    def write(record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name == "step":
                continue
            add = writer.add_text if isinstance(value, str) else writer.add_scalar
            add(name, value, record["step"])
        writer.flush()

    return Exporter(write, writer.close)


def wandb(
    *,
    project: str,
    name: str | None = None,
    mode: str = "offline",
    folder: str | os.PathLike[str] = ".",
    config: Mapping[str, Any] | None = None,
) -> Exporter:
    """Write a run of Weights & Biases, by default into ``folder``/wandb without any network.

    ``wandb sync folder/wandb/offline-run-*`` sends it later; ``mode="online"`` at once. ``config``
    shows beside the run: ``record.to_dict()`` of a ``RunRecord``, say.
    """
    try:
        import wandb as library
    except ImportError as error:
        raise _absent("wandb", error) from error
    run = library.init(
        project=project,
        name=name,
        mode=mode,  # type: ignore[arg-type]
        dir=os.fspath(folder),
        config=dict(config or {}),
        reinit="create_new",  # a run that the user has open stays open
        settings=library.Settings(silent=True, console="off"),
    )
    run.define_metric("*", step_metric="step")

    def close() -> None:
        run.finish()
        if library.run is None:  # else its process still serves the user's own run
            library.teardown()

    # When Python ends, wandb's own exit function is the first to run, and finishes the run.
    return Exporter(lambda record: run.log(dict(record)), close, at_exit=False)


def _absent(package: str, error: ImportError) -> ImportError:
    return ImportError(
        f"exporters.{package}: got no package {package} ({error}), need it to write its files. "
        f"pip install {package}, or pip install 'rlkit[loggers]' for both."
    )
