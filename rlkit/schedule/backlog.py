"""What a loop that runs ahead has taken and not trained, so that another can go on with it."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlkit.schedule.parts import check_prompts


class Backlog:
    """Prompts, and groups of responses, between a stream of prompts and the trainer.

    ``asynchronous`` makes one of the prompts it gets. One of yours outlives the loop: left early,
    for whatever reason, another loop over it goes on with what was ready and generates again what
    was half written. With a checkpointer it goes on in another process:

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
        self._waiting: deque[Any] = deque()
        self._begun: dict[int, Any] = {}  # group id -> its prompt
        self.ready: list[Any] = [] if untrained is None else list(untrained.groups())
        """Prepared groups, not yet in the hands of the trainer."""
        self.changed = threading.Condition()
        """Hold it to look at what is here."""
        if unfinished is not None:
            self._queue(unfinished)

    def _queue(self, prompts: Any) -> None:
        if not hasattr(prompts, "select"):
            raise TypeError(
                f"prompts: got {type(prompts).__name__}, need batches of prompts: of a task, or "
                "rk.tasks.prompt_batch([(prompt, answer), ...], tokenizer=model.tokenizer)."
            )
        self._waiting.extend(prompts.select([row]) for row in range(len(prompts)))

    def begin(self) -> Any:
        """The next prompt, from now on being generated; None after the last."""
        with self.changed:
            while not self._waiting:
                prompts = next(self._prompts, None)
                if prompts is None:
                    return None
                self._queue(prompts)
            prompt = self._waiting.popleft()
            self._begun[_id(prompt)] = prompt
            return prompt

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
            counts = len(self._waiting), len(self._begun), len(self.ready)
        return "Backlog({} prompts waiting, {} groups begun, {} ready)".format(*counts)


def _id(rows: Any) -> int:
    """Group id of rows of one group."""
    return int(rows.meta["group_ids"][0])
