"""Columns by name: who writes them, and how values that a user binds become rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch.rows import Rows
from rlkit.checks import did_you_mean
from rlkit.functions import round_trip, source_of

if TYPE_CHECKING:
    from rlkit.batch.table import ColumnTable

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

SHAPES = ("prompt_ids", "response_ids", "response_mask")
"""Columns that say how long the rows of others are, and where a value a response is spread."""

MAX_GROUP_ID = 1 << 47  # with 16 bits of a sample's number a uid stays below 2^63
META = ("uid", "group_ids", "policy_version")
"""Columns that identify a row; they travel with the batch."""


def check_name(name: object) -> None:
    """TypeError for ``batch[0]`` and ``batch[:4]``, which look like rows; names are columns."""
    if not isinstance(name, str):
        raise TypeError(
            f"batch[{name!r}]: got {type(name).__name__}, need the name of a column. Rows are "
            "batch.select([0, 1, 2]) by position or mask; batch.frame() shows them."
        )


def missing(name: str, known: Iterable[str]) -> KeyError:
    """The error of a column that is not there: what there is, and which stage writes it, or
    which name was meant.
    """
    near = "" if name in WRITTEN_BY else did_you_mean(name, {*known, *META, *WRITTEN_BY})
    writer = WRITTEN_BY.get(name, "a stage of yours")
    more = near or f" It is written by {writer}: run that first."
    return KeyError(f"batch has no column {name!r}; it has {sorted(known)}.{more}")


class Applied:
    """A function on named columns as a function on a batch; travels to where the rows lie."""

    def __init__(self, fn: Callable[..., Any], names: Sequence[str], whole_groups: bool) -> None:
        self.fn, self.names, self.whole_groups = fn, tuple(names), whole_groups

    @property
    def what(self) -> str:
        """The function in words."""
        return getattr(self.fn, "what", None) or source_of(self.fn).name

    def __call__(self, batch: "ColumnTable") -> Rows:
        """What the function returns on ``batch``, as rows."""
        result = round_trip(self.fn)(*(batch[name] for name in self.names))
        result = result.detach() if isinstance(result, Tensor) else result
        # Lengths are compared when the column gets its name: a list may be ids of its own.
        return _as_rows_of(batch, getattr(self.fn, "__name__", "apply"), result)


def bound_rows(batch: "ColumnTable", name: str, values: Any) -> Rows:
    """Rows of a value bound to ``name``, checked.

    [B, T] tensors lose the padding beyond each row's length.
    """
    rows = _as_rows_of(batch, name, values)
    if rows.lengths is not None:
        check_lengths(batch, name, rows.lengths.numpy())
    if name.endswith("_mask"):
        check_mask(name, rows.values)
    return rows


def token_axis(name: str) -> str:
    """The ids whose tokens a [B, T] column speaks of: the prompt's or the response's."""
    return "prompt_ids" if name.startswith("prompt_") else "response_ids"


def check_lengths(batch: "ColumnTable", name: str, lengths: np.ndarray) -> None:
    """ValueError if ragged rows [B] are not as long as the ids they speak of; ids are free."""
    axis = token_axis(name)
    if name.endswith("_ids") or axis not in batch.columns:
        return
    needed = batch.lengths(axis)
    bad = np.flatnonzero(lengths != needed)
    if len(bad):
        raise ValueError(
            f"{name}: got {lengths[bad[0]]} values in row {bad[0]}, need {needed[bad[0]]}, one a "
            f"token of {axis!r} in this batch ({len(bad)} of {len(batch)} rows differ)."
        )


def check_mask(name: str, values: Tensor | list[Any]) -> None:
    """ValueError for values other than 0 and 1."""
    if isinstance(values, list):
        kind = type(next(iter(values), None)).__name__
        raise TypeError(f"{name}: got rows of {kind}, need a tensor [B, T] of 0 and 1.")
    bad = values[(values != 0) & (values != 1)]
    if len(bad):
        raise ValueError(
            f"{name}: got {bad.reshape(-1)[0].item()}, need 0 or 1: a mask says which tokens "
            "count, not how much. Put weights into a column of their own."
        )


def _as_rows_of(batch: "ColumnTable", name: str, values: Any) -> Rows:
    """One row of ``values`` for each row of the batch."""
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
    axis = token_axis(name)
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
            "response token. Pass values made from this batch's own columns."
        )


def as_rows(name: str, values: Any, *, copy: bool = True) -> Rows:
    """Rows of a tensor [B] or [B, T] (its width kept), an array or a list.

    ``copy``: of a tensor, whose writer may go on changing it.
    """
    values = from_numpy(values)
    if isinstance(values, Tensor):
        if values.is_meta or values.layout != torch.strided:
            kind = "a tensor without values" if values.is_meta else f"a {values.layout} tensor"
            raise TypeError(f"{name}: got {kind}, need a dense one, as x.to_dense() makes.")
        values = values.detach().cpu()
        if values.ndim == 0:
            raise ValueError(f"{name}: got a 0-d tensor, need one value a row.")
        if values.ndim == 1:
            return Rows(values.clone() if copy else values)
        lengths = torch.full((len(values),), values.shape[1])
        packed = values.flatten(0, 1)  # no mask to select by: one copy at most
        return Rows(packed.clone() if copy else packed, lengths)
    values = list(values)
    shapes = {tuple(x.shape[1:]) for x in values if isinstance(x, Tensor)}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}: got rows of {len(shapes)} shapes after the first dimension, "
            f"{sorted(shapes)[:3]}; need the same one in all rows."
        )
    return Rows.from_list(values)


def check_group_ids(group_ids: np.ndarray) -> None:
    """ValueError for ids that a uid, group id x 65,536 + sample number, has no room for."""
    bad = group_ids[(group_ids < 0) | (group_ids >= MAX_GROUP_ID)]
    if len(bad):
        raise ValueError(
            f"group_ids: got {int(bad[0])}, need 0 to 2^47 - 1 ({MAX_GROUP_ID - 1}), so that uid = "
            "group id x 65536 + sample number fits into 64 bits. Number the prompts from 0."
        )


def int_array(name: str, values: Any) -> np.ndarray:
    """[B] int64 of ``values``; TypeError if they are not integers."""
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(
            f"{name}: got {array.dtype} of shape {array.shape}, need integers [B], one a row."
        )
    return array.astype(np.int64)
