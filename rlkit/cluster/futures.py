"""Future: a group call that runs."""

import threading
from typing import Any, Protocol

from rlkit.batch import Batch
from rlkit.shield import when_collected


class Answers(Protocol):
    """Where the result of a started call comes from, by its ticket."""

    def finish(self, ticket: Any, /, batch: Batch | None, timeout_s: float | None) -> Any:
        """Wait for a ticket's ranks; the merged result."""
        ...

    def done(self, ticket: Any, /) -> bool:
        """Whether all ranks have ended the call."""
        ...

    def cancel(self, ticket: Any, /) -> None:
        """Stop a call, or keep it from starting."""
        ...

    def abandon(self, ticket: Any, /) -> None:
        """Nobody will ask for the result."""
        ...


class Future:
    """A group call that runs: ``result()`` waits for it, once or often."""

    _outcome: tuple[Any, BaseException | None] | None = None

    def __init__(self, transport: Answers, ticket: Any, batch: Batch | None, what: str) -> None:
        self._transport, self._ticket, self._batch, self._what = transport, ticket, batch, what
        self._lock = threading.RLock()  # two threads may ask: rows are taken over once
        when_collected(self, transport.abandon, ticket)

    def result(self, timeout_s: float | None = None) -> Any:
        """The call's result; its error is raised here.

        TimeoutError names the call (default: the cluster's limit).
        """
        value, error = self._wait(timeout_s)
        if error is None:
            return value
        try:
            raise error
        finally:
            del self, error  # what keeps the error must not keep the future, nor the group

    def _wait(self, timeout_s: float | None) -> tuple[Any, BaseException | None]:
        with self._lock:
            if self._outcome is not None:
                return self._outcome
            try:
                outcome = self._transport.finish(self._ticket, self._batch, timeout_s), None
            except Exception as error:
                outcome = None, error.with_traceback(None)
                if not self.done():
                    return outcome  # a wait that was too short
            self._outcome = outcome
            return outcome

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        return self._outcome is not None or self._transport.done(self._ticket)

    def cancel(self) -> None:
        """Stop the call, or keep it from starting; what runs before it goes on."""
        self._transport.cancel(self._ticket)

    def __repr__(self) -> str:
        return f"Future({self._what}, {'done' if self.done() else 'running'})"


class Ended(Future):
    """The future of a call that has ended with ``value``."""

    def __init__(self, value: Any, what: str) -> None:
        self._what, self._outcome, self._lock = what, (value, None), threading.RLock()

    def cancel(self) -> None:
        """Nothing: it has ended."""
