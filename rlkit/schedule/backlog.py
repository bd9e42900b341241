"""What a loop that runs ahead has taken and not trained, so that another can go on with it."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlkit.schedule.parts import check_prompts


class Backlog:
    """Prompts, and groups of responses, between a stream of prompts and the trainer.

    ``asynchronous`` and ``one_step_off`` make one of the prompts they get. One of yours outlives
    the loop: left early, for whatever reason, another loop over it goes on with what was ready and
    generates again what was half written. With a checkpointer it goes on in another process:

        backlog = rk.schedule.Backlog(stream, **restored.batches)
        rule = rule.rebase(version=restored.next_step)
        for record in asynchronous(backlog, feed, prepare, train_step, sync, rule=rule):
            with backlog.held() as batches:
                checkpoint.save(record["step"], prompts=stream, batches=batches, ...)
    """

    def __init__(
        self, prompts: Iterable[Any], *, unfinished: Any = None, untrained: Any = None
    ) -> None:
        """``unfinished``, prompts, come before ``prompts``; ``untrained``, prepared groups, are
        trained.
        """
        self._prompts = iter(check_prompts(prompts))
        self._waiting: deque[Any] = deque([] if unfinished is None else [unfinished])
        self._begun: dict[Any, Any] = {}  # group id -> its prompt; or, of a whole batch, any key
        self.ready: list[Any] = [] if untrained is None else list(untrained.groups())
        """Prepared groups, not yet in the hands of the trainer."""
        self.changed = threading.Condition()
        """Hold it to look at what is here."""

    def _next(self) -> Any:
        return self._waiting.popleft() if self._waiting else next(self._prompts, None)

    def first_size(self) -> int:
        """Prompts of the batch that comes first; 1 if there is none."""
        with self.changed:
            following = next(self._prompts, None)
            if following is None:
                return 1
            self._waiting.append(following)
            return len(following) if hasattr(following, "select") else 1  # `begin` names it

    def begin(self) -> Any:
        """The next prompt, from now on being generated; None after the last."""
        with self.changed:
            while (prompts := self._next()) is not None:
                if not hasattr(prompts, "select"):
                    raise TypeError(
                        f"prompts: got {type(prompts).__name__}, need batches of prompts: of a "
                        "task, or rk.tasks.prompt_batch([(prompt, answer), ...], "
                        "tokenizer=model.tokenizer)."
                    )
                if len(prompts) == 1:
                    self._begun[_id(prompts)] = prompts
                    return prompts
                rows = range(len(prompts))
                self._waiting.extendleft(prompts.select([row]) for row in reversed(rows))
            return None

    def begin_batch(self) -> Any:
        """The next batch of prompts, as it came from the stream, from now on being generated."""
        with self.changed:
            prompts = self._next()
            if prompts is not None:
                self._begun[object()] = prompts
            return prompts

    def finish_batch(self) -> None:
        """The batch that was begun first is in the hands of the trainer."""
        with self.changed:
            self._begun.pop(next(iter(self._begun)))

    def take(self) -> Any:
        """All that is ready as one batch; None if nothing is."""
        with self.changed:
            groups, self.ready = self.ready, []
            return groups[0].concat(groups) if groups else None

    def finish(self, groups: Iterable[Any]) -> None:
        """These groups are generated and prepared."""
        with self.changed:
            for group in groups:
                if self._begun.pop(_id(group), None) is None:
                    raise RuntimeError(
                        f"Backlog: got group {_id(group)}, which this loop has not begun. Does "
                        "another loop use the same feed? Make one, and a rollout group, for each."
                    )
                self.ready.append(group)

    def give_back(self, groups: Iterable[Any]) -> None:
        """The loop ends: ``groups`` are ready still, and what was being generated waits again."""
        with self.changed:
            self.ready[:0] = groups
            self._waiting.extendleft(reversed(self._begun.values()))
            self._begun.clear()

    @contextmanager
    def held(self) -> Iterator[Mapping[str, Any]]:
        """Nothing comes or goes meanwhile: ``unfinished`` prompts and ``untrained`` groups, each a
        batch if there are any.
        """
        with self.changed:
            parts = {"unfinished": [*self._begun.values(), *self._waiting], "untrained": self.ready}
            yield {name: rows[0].concat(rows) for name, rows in parts.items() if rows}

    def __repr__(self) -> str:
        with self.changed:
            begun = sum(map(len, self._begun.values()))
            counts = sum(map(len, self._waiting)), begun, len(self.ready)
        return "Backlog({} prompts waiting, {} groups begun, {} ready)".format(*counts)


def _id(rows: Any) -> int:
    """Group id of rows of one group."""
    return int(rows.meta["group_ids"][0])
