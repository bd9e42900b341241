"""From a loss a token [B, T] to one number: what a loss takes as ``aggregate=``.

Functions (x [B, T], batch) -> scalar, with the denominators of the whole optimizer step, as the
batch keeps them: the results of micro-batches and data-parallel ranks add up to that of one batch.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from rlkit.algo.masking import masked_sum


@runtime_checkable
class LossBatch(Protocol):
    """What a loss reads of a batch; ``rlkit.Batch`` is one."""

    def __getitem__(self, name: str) -> Any:
        """Values of a column, [B] or [B, T]."""
        ...

    def token_mean(self, x: Tensor) -> Tensor:
        """Sum of x [B, T] under the response mask over the step's trainable tokens."""
        ...

    def seq_mean(self, x: Tensor) -> Tensor:
        """Sum of x [B], or of the masked means of the rows of x [B, T], over the step's rows."""
        ...


Aggregate = Callable[[Tensor, LossBatch], Tensor]
"""(x [B, T], batch) -> scalar."""


def token_mean(x: Float[Tensor, "B T"], batch: LossBatch) -> Float[Tensor, ""]:
    """Every trainable token of the step weighs the same (DAPO, 2503.14476, 2025); x [B, T]."""
    return batch.token_mean(x)


def seq_mean_token_mean(x: Float[Tensor, "B T"], batch: LossBatch) -> Float[Tensor, ""]:
    """Every response weighs the same, long or short (GRPO, 2402.03300, 2024); x [B, T]."""
    return batch.seq_mean(x)


def seq_mean_token_sum(
    x: Float[Tensor, "B T"], batch: LossBatch, *, length: int | float = 1
) -> Float[Tensor, ""]:
    """Sum over the tokens of a response / length, mean over the responses of the step; x [B, T].

    With one constant for all as the length, such as the token limit, no response is favoured for
    being short or long (Dr. GRPO, 2503.20783, 2025):
    ``functools.partial(seq_mean_token_sum, length=1024)``.
    """
    return batch.seq_mean(masked_sum(x, batch["response_mask"]) / length)
