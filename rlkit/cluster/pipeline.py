"""The calls of one group that are on their way: answers, failures, interrupts, in order.

Ranks run calls one after another. When a rank fails a call, its peers may wait for it in a
collective: they are stopped, calls queued behind the failed one are not run, and the group is
mended before the next. What a call was given is kept until all ranks have answered it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rlkit.cluster.calls import Call, Failure, Interrupted, is_error

logger = logging.getLogger("rlkit.cluster")

RESPAWN = (
    "cluster.respawn(group), which loses the workers' state: weights that were trained come back "
    "from a checkpoint alone"
)
SETTLE_S = 3.0
"""How long a call waits for one that was interrupted before it."""
RELEASE_S = 10.0
"""How long the peers of a failed rank may take to stop."""


class Pipeline:
    """Calls of one group in the order they were started."""

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        check: Callable[[], None],
        send: Callable[..., list[Any]],
        mend: Callable[[], None],
        discard: Callable[[Any], None],
        died: Callable[[list[int]], None] = lambda ranks: None,
    ) -> None:  # fmt: skip
        """``died(ranks)`` hears of ranks whose process is gone."""
        self.name, self.timeout_s = name, timeout_s
        self._check, self._send, self._mend = check, send, mend
        self._discard, self._died = discard, died
        self._calls: list[Call] = []
        self._interrupted: Call | None = None
        self._lock = threading.RLock()
        self.epoch = 0  # calls of an earlier epoch are not run any more
        self.broken = False  # a rank died, or a call was given up: it runs on
        self.lost = ""  # why no call can succeed any more

    def add(self, call: Call) -> None:
        """Take up a call that was started; RuntimeError if its processes were ended meanwhile."""
        with self._lock:
            if self.lost and not call.builds:
                raise RuntimeError(f"{self.name}.{call.what}: {self._end()}")
            self._calls.append(call)

    def close(self, why: str) -> None:
        """Its processes are gone: calls end with an error, and none begins before ``open``."""
        with self._lock:
            self._interrupted = None
            self._lose(why)
            for call in self._calls:
                if not call.ended:
                    call.error = RuntimeError(f"{self.name}.{call.what}: {self._end()}")
            self._calls.clear()

    def open(self) -> None:
        """Its processes are there, and new."""
        self.broken, self.lost = False, ""

    @property
    def stuck(self) -> bool:
        """Whether a rank is dead, or runs something that nobody waits for any more."""
        late = self._interrupted
        return self.broken or (late is not None and not late.ended)

    def settle(self) -> None:
        """Before a call: one that was interrupted must have ended, or this says what runs."""
        self._pump(0.0)
        if self.lost:
            raise RuntimeError(f"{self.name}: {self._end()}")
        call = self._interrupted
        if call is None:
            return
        deadline = time.time() + SETTLE_S
        while not call.ended and time.time() < deadline:
            self._pump(deadline - time.time())
        if not call.ended:
            names = ", ".join(f"{self.name}/{rank}" for rank in call.waiting.values())
            raise RuntimeError(
                f"{names} still running {call.what}, for {time.time() - call.start_s:.0f} s; it "
                f"stops when the library call it is in returns. Try again later, or {RESPAWN}."
            )
        self._interrupted = None

    def wait(self, call: Call, timeout_s: float | None) -> list[Any]:
        """Answers of all ranks in rank order, or the call's error."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.time() + limit
        while not call.ended:
            if (left := deadline - time.time()) <= 0:
                self.give_up(call, limit)
            self._pump(min(left, 1.0))
        call.collected = True
        # An error that was raised holds the frames of who waits, so nothing here may hold it.
        error, call.error = call.error, None
        answers, call.answers = call.answers, {}
        if error is not None:
            self._free(answers)  # of ranks that did not fail
            raise error
        return [answers[rank] for rank in range(len(call.refs))]

    def give_up(self, call: Call, waited_s: float) -> NoReturn:
        """TimeoutError that names the ranks that did not answer."""
        self.broken = True
        names = ", ".join(f"{self.name}/{rank}" for rank in call.waiting.values())
        raise TimeoutError(
            f"{self.name}.{call.what}: {names} did not answer within {waited_s:.0f} s. It may "
            "still run: wait with future.result(timeout_s=...), raise "
            f"rk.launch(timeout_s=...), or {RESPAWN}."
        )

    def done(self, call: Call) -> bool:
        """Whether the call has ended; never waits."""
        if not call.ended:
            self._pump(0.0)
        return call.ended

    def cancel(self, call: Call, reason: str) -> None:
        """Stop a call on all ranks, or keep it from starting; the one that runs now goes on."""
        import ray
        from ray import exceptions

        if call.ended:
            return
        try:
            states = ray.get(self._send("cancel", call.number, reason), timeout=self.timeout_s)
        except exceptions.RayActorError:  # the call fails by itself, and names who died
            return
        if "running" in states:
            self._interrupted = call

    def abandon(self, call: Call) -> None:
        """Nobody will ask for the call's result: what it made is freed when it is there."""
        call.abandoned = True
        if call.ended and not call.collected:
            self._drop(call)

    # ---- inside ----

    def _pump(self, timeout_s: float) -> None:
        """Wait for any answer of any call, and act on what has come."""
        import ray

        self._check()
        with self._lock:
            refs = [ref for call in self._calls for ref in call.waiting]
        if not refs:
            return
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ready and timeout_s > 0:
            ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_s)
        with self._lock:
            self._take(set(ready))
            for call in list(self._calls):
                if call.error is not None:
                    continue
                if call.skipped:
                    call.error = self._error_of(call)
                elif call.failed:
                    self._fail(call)
            for call in [c for c in self._calls if c.ended]:
                self._calls.remove(call)
                call.held = None
                if call.abandoned and not call.collected:
                    self._drop(call)

    def _take(self, ready: set[Any]) -> None:
        """Store the answers that are there."""
        import ray

        for call in self._calls:
            for ref, rank in call.waiting.items():
                if ref in ready:
                    try:
                        call.answers[rank] = ray.get(ref, timeout=self.timeout_s)
                    except Exception as error:
                        call.answers[rank] = error

    def _fail(self, call: Call) -> None:
        """A rank failed: stop its peers, skip what is queued behind, mend the group."""
        rank = next(r for r, a in call.answers.items() if is_error(a))
        later = [c for c in self._calls if c.number > call.number and not c.ended]
        alone = len(call.refs) == 1
        if not alone:
            self.epoch += 1
            self._send("advance", self.epoch)
            if call.waiting:
                self._send("cancel", call.number, f"{self.name}/{rank} failed")
            self._await([call, *later])
        call.error = self._error_of(call)
        if alone:
            return
        for other in later:
            other.error = Interrupted(
                f"{self.name}.{other.what}: not run, for {call.what} before it failed "
                f"({type(call.error).__name__}). Call it again."
            )
        if not self.lost and not any(c.waiting for c in (call, *later)):
            try:
                self._mend()
            except Exception as error:
                self._lose(f"its workers could not meet again after {call.what} failed ({error})")

    def _await(self, calls: Sequence[Call]) -> None:
        """Wait until the calls' ranks have stopped, for a while."""
        import ray

        deadline = time.time() + RELEASE_S
        while time.time() < deadline:
            refs = [ref for call in calls for ref in call.waiting]
            if not refs:
                return
            ready, _ = ray.wait(refs, num_returns=1, timeout=max(0.0, deadline - time.time()))
            self._take(set(ready))
        self._interrupted = next(call for call in calls if call.waiting)

    def _dead(self, call: Call) -> list[int]:
        """Ranks whose process is gone."""
        from ray.exceptions import RayActorError

        return sorted(rank for rank, a in call.answers.items() if isinstance(a, RayActorError))

    def _error_of(self, call: Call) -> BaseException:
        """What the caller gets: a death, or the error of the rank that failed by itself."""
        dead = self._dead(call)
        if dead:
            self._died(dead)
            names = ", ".join(f"{self.name}/{rank}" for rank in dead)
            self._lose(f"worker {names} died ({str(call.answers[dead[0]]).splitlines()[0]})")
            return RuntimeError(f"{self.name}.{call.what}: {self._end()}")
        failed = [a for a in call.answers.values() if is_error(a)]
        # A peer that saw its connection break is a consequence; the rank that raised is the cause.
        first = min(failed, key=lambda a: isinstance(a, Failure) and a.of_peer)
        return first.raised() if isinstance(first, Failure) else first

    def _lose(self, why: str) -> None:
        self.broken, self.lost = True, why

    def _end(self) -> str:
        return f"{self.lost}. Its state is lost; cluster.respawn(group) starts the group again."

    def _drop(self, call: Call) -> None:
        call.collected = True
        errors = [call.error] + [a for a in call.answers.values() if is_error(a)]
        error = next((each for each in errors if each is not None), None)
        error = error.error if isinstance(error, Failure) else error
        if error is not None and not isinstance(error, Interrupted):
            logger.warning(
                "%s.%s failed, and nobody asks for its result: %s: %s",
                self.name, call.what, type(error).__name__, error,
            )  # fmt: skip
        self._free(call.answers)

    def _free(self, answers: dict[int, Any]) -> None:
        for answer in answers.values():
            if not is_error(answer):
                self._discard(answer)
