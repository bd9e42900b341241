"""What engines share: the queue, serving requests to their end, pauses."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlkit.checks import whole
from rlkit.engines.requests import OnToken, Request, Response, check_fits, check_unique
from rlkit.models.pretrained import Pretrained, need_model


class BaseEngine:
    """``generate``, ``add`` and pauses over an engine's own ``_begin``, ``_unfinished``, ``step``
    and ``abort``.
    """

    def __init__(self, model: Pretrained, *, seed: int, max_rows: int, max_len: int | None) -> None:
        need_model(model)
        self.spec, self.tokenizer, self.seed, self.version = model.spec, model.tokenizer, seed, 0
        self.max_rows = whole("max_rows", max_rows, what="slot")
        longest = model.spec.max_positions
        self.max_len = longest if max_len is None else min(whole("max_len", max_len), longest)
        self.paused = self.asleep = False

    # ---- an engine's own ----

    def _begin(self, requests: Sequence[Request]) -> None:
        """Queue requests that were checked."""
        raise NotImplementedError

    def _unfinished(self) -> Collection[int]:
        """Uids that wait or run."""
        raise NotImplementedError

    def step(self, *, on_token: OnToken | None = None) -> list[Response]:
        """One token for every running row; returns what finished."""
        raise NotImplementedError

    def abort(self, uids: Collection[int] | None = None) -> list[Response]:
        """Stop ``uids`` or everything; returns what running rows have sampled."""
        raise NotImplementedError

    # ---- shared ----

    def add(self, request: Request) -> None:
        """Queue one prompt; errors at once if it can never be served."""
        self._queue([request])

    def _queue(self, requests: Sequence[Request]) -> None:
        limits: dict[str, Any] = {"vocab_size": self.spec.vocab_size, "max_len": self.max_len}
        for request in requests:
            check_fits(request, max_rows=self.max_rows, **limits)
        check_unique(requests, taken=self._unfinished())
        self._begin(requests)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_response: Callable[[Response], object] | None = None,
        on_token: OnToken | None = None,
    ) -> list[Response]:
        """All responses of ``requests``, in their order; requests queued before are served too and
        dropped. ``on_response`` gets each as it finishes, ``on_token`` every token. What they abort
        is left out.

        An error, of theirs too, or an interrupt aborts everything: no one waits for rows left over.
        """
        self.check_awake()
        self._queue(requests)
        done: dict[int, Response] = {}
        try:
            while self._unfinished():
                self.check_awake()
                for response in self.step(on_token=on_token):
                    done[response.uid] = response
                    if on_response:
                        on_response(response)
        except BaseException:
            self.abort()
            raise
        return [done[uid] for request in requests for uid in request.uids if uid in done]

    def check_awake(self) -> None:
        """RuntimeError while paused or asleep: nothing would ever finish."""
        if self.paused or self.asleep:
            raise RuntimeError("engine: paused or asleep; call resume() or wake() first.")

    def pause(self) -> None:
        """Do nothing in ``step`` until ``resume``; running rows keep their place."""
        self.paused = True

    def resume(self) -> None:
        """Go on after ``pause``."""
        self.paused = False

    def _check_not_asleep(self) -> None:
        if self.asleep:
            raise RuntimeError("engine: asleep; call wake() and load weights before generating.")

    def _check_may_sleep(self, num_rows: int) -> None:
        if num_rows:
            raise RuntimeError(
                f"engine: {num_rows} rows are running; finish or abort them before sleep."
            )
