"""One step off: the next batch is generated while this one is trained."""

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from typing import Any

from rlkit.schedule.ahead import STOP_S, wait_for
from rlkit.schedule.backlog import Backlog
from rlkit.schedule.executors import Threads
from rlkit.schedule.parts import Record, check_calls, check_executor, record, returned
from rlkit.types import Executor

logger = logging.getLogger("rlkit.schedule")


def one_step_off(
    prompts: Iterable[Any] | Backlog,
    rollout_step: Callable[[Any], Any],
    prepare: Callable[[Any], None],
    train_step: Callable[[Any], Mapping[str, Any]],
    sync: Callable[[], object],
    executor: Executor | None = None,
) -> Generator[Record, None, None]:
    """Generate the next batch while this one is trained: every batch after the first is one step
    stale.

    Weights are handed over between two generations, when both have ended; the longest response
    holds up the next step. Arguments are those of ``synchronous``.

    However it ends, it waits for what is being generated. With a ``Backlog`` as ``prompts`` nothing
    of that is lost: another loop generates that batch again, and trains what was prepared.
    """
    check_calls(rollout_step=rollout_step, prepare=prepare, train_step=train_step, sync=sync)
    backlog = prompts if isinstance(prompts, Backlog) else Backlog(prompts)
    with closing(check_executor(executor) or Threads()) as runs:
        line = _Batches(backlog, rollout_step, prepare, runs)
        try:
            for step in itertools.count():
                if (batch := line.take(step)) is None:
                    break
                metrics = runs.run(train_step, batch)
                line.trained(step)
                sync()
                yield record(step, batch, metrics)
        finally:
            line.stop()


class _Batches:
    """Batches from prompts to trainer, one in the engines while another is trained."""

    def __init__(
        self,
        backlog: Backlog,
        rollout_step: Callable[[Any], Any],
        prepare: Callable[[Any], None],
        runs: Executor,
    ) -> None:
        self._backlog, self._rollout_step = backlog, rollout_step
        self._prepare, self._runs = prepare, runs
        self._chosen: Any = None  # in the hands of the trainer
        self._stopped = False
        self._begin()

    def _begin(self) -> None:
        prompts = self._backlog.begin_batch()
        self._coming = None if prompts is None else self._runs.submit(self._generate, prompts)

    def _generate(self, prompts: Any) -> Any:
        return None if self._stopped else self._rollout_step(prompts)

    def take(self, step: int) -> Any:
        """The next batch, prepared; None after the last."""
        self._chosen = self._backlog.take()
        if self._chosen is None and self._coming is not None:
            wait_for(self._runs, [self._coming], f"the generation of step {step}")
            batch = returned(self._coming.result())
            self._begin()
            self._prepare(batch)
            self._backlog.finish_batch()
            self._chosen = batch
        return self._chosen

    def trained(self, step: int) -> None:
        """What was taken is trained; wait until no weights are in use."""
        self._chosen = None
        if self._coming is not None:
            wait_for(self._runs, [self._coming], f"the generation of step {step + 1}")

    def stop(self) -> None:
        """Begin nothing more; what was not trained is the backlog's again."""
        self._stopped = True
        try:
            if self._coming and not self._runs.wait([self._coming], timeout_s=STOP_S):
                logger.warning("one_step_off: a generation goes on, %g s after the end", STOP_S)
        finally:
            self._backlog.give_back([] if self._chosen is None else self._chosen.groups())
