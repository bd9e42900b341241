"""A function that generates a batch, as a feed."""

from collections.abc import Callable
from typing import Any

from rlkit.schedule.parts import returned


class Called:
    """A feed of ``rollout_step``, called again and again, with at most ``size`` prompts at a time.

    A call is whole: weights that come meanwhile wait in the worker until it has ended, so no
    response is interrupted and the longest holds up the others of its call.
    """

    interrupts = True  # weights come between two calls; nothing has to be drained for them

    def __init__(self, rollout_step: Callable[[Any], Any], *, size: int) -> None:
        self._rollout_step, self._size, self._waiting = rollout_step, size, []

    @property
    def num_running(self) -> int:
        """Prompts added and not taken yet."""
        return len(self._waiting)

    def add(self, prompts: Any) -> None:
        """Generate these after the ones before."""
        self._waiting += [prompts.select([row]) for row in range(len(prompts))]

    def advance(self) -> Any:
        """Groups of the next prompts."""
        prompts = self._waiting[: self._size]
        batch = returned(self._rollout_step(prompts[0].concat(prompts)))
        del self._waiting[: self._size]
        return batch

    def mend(self, sync: Callable[[], object]) -> bool:
        """A function can not be started again: its error ends the loop."""
        return False

    def close(self) -> None:
        """Forget what waits."""
        self._waiting.clear()

    def __repr__(self) -> str:
        return f"{self._rollout_step!r} ({self.num_running} prompts waiting)"
