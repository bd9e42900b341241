"""Columns by name: who writes them, and how values that a user binds become rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkit.functions import round_trip
from rlkit.rows import Rows

if TYPE_CHECKING:
    from rlkit.batch import Batch

_TASK, _GENERATE = "a task", "rollout.generate"
WRITTEN_BY = {
    "prompt": _TASK,
    "answer": _TASK,
    "prompt_ids": _TASK,
    "prompt_mask": _TASK,
    "response": _GENERATE,
    "response_ids": _GENERATE,
    "response_mask": _GENERATE,
    "rollout_logprobs": _GENERATE,
    "token_version": _GENERATE,
    "temperature": _GENERATE,
    "finish_reason": _GENERATE,
    "rewards": "rk.score(reward_fn, batch)",
    "logprobs": "actor.compute_logprobs(batch)",
    "old_logprobs": "actor.compute_logprobs(batch)",
    "ref_logprobs": "reference.compute_logprobs(batch)",
    "values": "critic.compute_values(batch)",
    "advantages": "batch.expand(advantage_fn(...))",
    "returns": "gae",
}
"""Column -> the stage that writes it, for the error of a skipped stage."""

META = ("uid", "group_ids", "policy_version")
"""Columns that identify a row; they travel with the batch."""


def missing(name: str, known: Iterable[str]) -> KeyError:
    """The error of a column that is not there: what there is, and which stage writes it."""
    writer = WRITTEN_BY.get(name, "a stage of yours")
    return KeyError(
        f"batch has no column {name!r}; it has {sorted(known)}. It is written by {writer}: run "
        "that first."
    )


class Applied:
    """A function on named columns as a function on a batch; travels to where the rows lie."""

    def __init__(self, fn: Callable[..., Any], names: Sequence[str], whole_groups: bool) -> None:
        self.fn, self.names, self.whole_groups = fn, tuple(names), whole_groups

    def __call__(self, batch: "Batch") -> Rows:
        """What the function returns on ``batch``, as rows."""
        result = round_trip(self.fn)(*(batch[name] for name in self.names))
        result = result.detach() if isinstance(result, Tensor) else result
        return bound_rows(batch, getattr(self.fn, "__name__", "apply"), result)


def bound_rows(batch: "Batch", name: str, values: Any) -> Rows:
    """Rows of a value bound to ``name``.

    [B, T] tensors lose the padding beyond each row's length.
    """
    values = from_numpy(values)
    if not isinstance(values, Tensor):
        values = list(values) if isinstance(values, Iterable) else [values]
    if isinstance(values, Tensor) and values.ndim == 0:
        raise ValueError(f"{name}: got a 0-d tensor, need {len(batch)} values, one a row.")
    if len(values) != len(batch):
        raise ValueError(
            f"{name}: got {len(values)} values, need {len(batch)}, one a row of this batch, in "
            "its order."
        )
    axis = "prompt_ids" if name.startswith("prompt_") else "response_ids"
    if not isinstance(values, Tensor) or values.ndim < 2 or axis not in batch.columns:
        return as_rows(name, values)
    lengths = batch.lengths(axis)
    width = int(lengths.max(initial=0))
    if values.shape[1] != width:
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, need [{len(batch)}, {width}], one value a "
            f"token of {axis!r} in this batch."
        )
    return Rows.from_padded(values.detach().cpu(), torch.from_numpy(lengths))


def from_numpy(values: Any) -> Any:
    """A numpy array as a tensor of its own, or as a list if it doesn't hold numbers.

    Others as they are.
    """
    if not isinstance(values, np.ndarray):
        return values
    return torch.from_numpy(values.copy()) if values.dtype.kind in "biuf" else values.tolist()


def check_shape(name: str, x: Tensor, shape: Sequence[int]) -> None:
    """ValueError if ``x`` has another shape than ``shape``."""
    if x.shape != tuple(shape):  # broadcasting would hide it
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}, need {list(shape)}, one value a row or a "
            "response token. "
            "Pass values made from this batch's own columns."
        )


def as_rows(name: str, values: Any) -> Rows:
    """Rows of a tensor [B] or [B, T] (its width kept), an array or a list.

    The values are copied.
    """
    values = from_numpy(values)
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.ndim == 0:
            raise ValueError(f"{name}: got a 0-d tensor, need one value a row.")
        if values.ndim == 1:
            return Rows(values.clone())  # the writer may go on changing it
        return Rows.from_padded(values, torch.full((len(values),), values.shape[1]))
    return Rows.from_list(values)


def int_array(name: str, values: Any) -> np.ndarray:
    """[B] int64 of ``values``; TypeError if they are not integers."""
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{name}: got {array.dtype} of shape {array.shape}, need integers [B], one a row."
        )
    return array.astype(np.int64)
