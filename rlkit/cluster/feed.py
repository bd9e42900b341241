"""RolloutFeed: generation that goes on by itself, on the driver's side of a rollout group."""

from collections import Counter

import numpy as np

from rlkit.batch import Batch
from rlkit.checks import whole
from rlkit.cluster.group import Future, WorkerGroup


class RolloutFeed:
    """Groups go in with ``add`` and come out whole with ``advance``, as they end.

    The engines generate in slices of ``seconds``. While one result is looked at, the next slice is
    queued already, so engines on a cluster do not wait for the driver; new prompts and new weights
    get in between two slices. Each prompt goes to the engine with the fewest groups.
    """

    def __init__(
        self,
        rollout: WorkerGroup,
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        seconds: float = 0.1,
        interrupts: bool = True,
    ) -> None:
        """``interrupts``: weights change while responses are half written; without, those that run
        are finished under the old weights first, and nothing new begins meanwhile.
        """
        if not seconds > 0:
            raise ValueError(f"seconds: got {seconds}, need more than 0: how long a slice takes.")
        self.rollout, self.seconds, self.interrupts = rollout, seconds, interrupts
        self._how = {"n": whole("n", n, what="response a prompt"), "temperature": temperature}
        self._how["max_new_tokens"] = max_new_tokens
        self._rank_of: dict[int, int] = {}  # group id -> the worker that has it
        self._next: Future | None = None

    @property
    def num_running(self) -> int:
        """Groups added and not taken yet."""
        return len(self._rank_of)

    def add(self, prompts: Batch) -> None:
        """Generate a group for each prompt, beside those that run."""
        ids = prompts.meta["group_ids"].tolist()
        twice = [group for group in ids if group in self._rank_of]
        if twice:
            raise ValueError(
                f"add: got group {twice[0]}, which is being generated; need other prompts."
            )
        load = Counter(dict.fromkeys(range(len(self.rollout)), 0))
        load.update(self._rank_of.values())
        ranks = []
        for group in ids:
            rank = min(load, key=lambda rank: (load[rank], rank))
            load[rank] += 1
            ranks.append(rank)
            self._rank_of[group] = rank
        try:
            self.rollout.begin(prompts, ranks=np.asarray(ranks), **self._how)
        except BaseException:
            for group in ids:
                del self._rank_of[group]
            raise

    def advance(self) -> Batch | None:
        """Let generation go on for a slice: groups finished since, whole; None: none."""
        if not self._rank_of:
            return None
        slice_, self._next = self._next or self._start(), None
        batch = slice_.result()
        if batch is not None:
            for group in set(batch.meta["group_ids"].tolist()):
                self._rank_of.pop(group, None)
        if self._rank_of and not self.rollout.in_process:
            self._next = self._start()
        return batch

    def _start(self) -> Future:
        return self.rollout.submit.advance(seconds=self.seconds)

    def __repr__(self) -> str:
        load = Counter(self._rank_of.values())
        name = self.rollout.name
        engines = ", ".join(f"{num} on {name}/{rank}" for rank, num in sorted(load.items()))
        return f"RolloutFeed(groups running: {engines or 'none'})"
