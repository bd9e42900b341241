"""Contracts of the parts that a user may replace: Protocols, no base classes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rlkit.batch import Batch
    from rlkit.batch.rows import Rows
    from rlkit.batch.store import Column, Part
    from rlkit.config import Layout


class RewardFn(Protocol):
    """Judges one response: ``(prompt, response, answer) -> float``."""

    def __call__(self, prompt: str, response: str, answer: str) -> float:
        """The reward of one response; NaN takes it out of its group."""
        ...


class AdvantageFn(Protocol):
    """Turns rewards [B] and group_ids [B] into one advantage a response [B]."""

    def __call__(self, rewards: "Tensor", group_ids: "Tensor") -> "Tensor":
        """One advantage a response, in the order of the rewards."""
        ...


class LossFn(Protocol):
    """``(logprobs [B, T], batch) -> (scalar, dict of 0-d tensors)``.

    Of a critic: values [B, T] first. A third parameter named ``entropy`` gets the entropies [B, T]
    of the next-token distributions.
    """

    def __call__(self, logprobs: "Tensor", batch: "Batch", /) -> "tuple[Tensor, dict[str, Tensor]]":
        """Loss and metrics of one micro-batch, averaged with ``batch.token_mean``."""
        ...


@runtime_checkable  # batch.py is checked at run time under pytest
class RowStore(Protocol):
    """Keeps the values of columns; parts say where they are."""

    def put(self, name: str, uids: "np.ndarray", rows: "Rows") -> "Part":
        """Keep rows [N] of ``uids`` [N] under a new key."""
        ...

    def put_all(self, uids: "np.ndarray", columns: "Mapping[str, Rows]") -> "dict[str, Part]":
        """``put`` of several columns of the same rows at once."""
        ...

    def fetch(self, requests: "Sequence[tuple[Part, np.ndarray]]") -> "list[Rows]":
        """For each (part, uids) those rows, in that order."""
        ...

    def apply(self, call: "Callable[[Batch], Rows]", batch: "Batch", name: str) -> "Column":
        """Run ``call(batch) -> rows`` beside the data."""
        ...


class Engine(Protocol):
    """Generates: prompts in, sampled tokens with logprobs and versions out."""

    def add(self, request: Any) -> None:
        """Queue one prompt and its samples."""
        ...

    def step(self) -> list[Any]:
        """One token for every running row; returns what finished."""
        ...

    def abort(self, uids: "Collection[int] | None" = None) -> list[Any]:
        """Stop these or all; returns what they have sampled."""
        ...

    def load_weights(self, tensors: "Mapping[str, Tensor]", *, version: int) -> None:
        """Replace the weights as a whole, between two tokens of what runs."""
        ...

    def pause(self) -> None:
        """Stop after the current token."""
        ...

    def resume(self) -> None:
        """Go on."""
        ...

    def sleep(self) -> None:
        """Give device memory back."""
        ...

    def wake(self) -> None:
        """Take device memory again."""
        ...


class Backend(Protocol):
    """Runs a model forward and backward over packed rows.

    One that cuts the model over ranks also has ``forward_all`` and ``forward_backward_all``, which
    take the micro-batches of a step at once, and its ``state_dict`` is called on all ranks.
    """

    def forward(self, batch: "Batch", *, entropy: bool = False) -> "tuple[Rows, Rows | None]":
        """Logprobs (and entropies) of the response tokens; of a critic their values."""
        ...

    def forward_backward(self, batch: "Batch", loss_fn: LossFn) -> "dict[str, Tensor]":
        """Add the gradient of one micro-batch; returns its share of metrics and ``loss``."""
        ...

    def step(self) -> "dict[str, float]":
        """One optimizer step on the sum of gradients."""
        ...

    def state_dict(self) -> "Mapping[str, Tensor]":
        """Weights by Hugging Face name."""
        ...

    def resident(self) -> "Mapping[str, Tensor]":
        """What stays on the device between calls, not copied: ``offload`` moves its storages."""
        ...

    @property
    def layout(self) -> "Layout":
        """How the model is cut."""
        ...


class Handle(Protocol):
    """A call that an executor runs."""

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        ...

    def result(self, timeout: float | None = None, /) -> Any:
        """Wait for it: what it returned, or its error."""
        ...


class Executor(Protocol):
    """Runs a schedule's calls: in turn, in threads beside each other, or on a virtual clock."""

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Handle:
        """Start ``call(*args)``, or queue it."""
        ...

    def run(self, call: Callable[..., Any], /, *args: Any) -> Any:
        """What ``call(*args)`` returns, from the caller's thread: Ctrl-C reaches it."""
        ...

    def wait(self, handles: Sequence[Handle], *, timeout_s: float) -> list[Handle]:
        """Wait until one of them is done; those that are, none after ``timeout_s``."""
        ...

    def now(self) -> float:
        """Time on the executor's clock."""
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class Feed(Protocol):
    """Generation that goes on by itself: groups are added, and taken as they are finished."""

    interrupts: bool
    """Whether weights may change while groups are half written."""

    @property
    def num_running(self) -> int:
        """Groups added and not taken yet."""
        ...

    def add(self, prompts: "Batch") -> None:
        """Generate a group for each prompt, beside those that run."""
        ...

    def advance(self) -> "Batch | None":
        """Let generation go on for a while: groups finished since, whole; None: none."""
        ...

    def mend(self, sync: Callable[[], object]) -> bool:
        """Whether engines had died: they are started again, and get their weights by ``sync()``."""
        ...

    def close(self) -> None:
        """Generate no more; forget the groups that were not taken."""
        ...


class Schedule(Protocol):
    """Orders the stages of a run: an iterator of one record a step."""

    def __call__(
        self,
        prompts: Iterable["Batch"],
        rollout_step: Callable[..., Any],
        prepare: Callable[..., Any],
        train_step: Callable[..., Any],
        sync: Callable[[], Any],
        executor: Executor | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Run the stages in this schedule's order."""
        ...
