"""What an optimizer step is made of: checks, a rank's share of the rows, metrics as one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch import Batch
from rlkit.batch.columns import check_mask
from rlkit.batch.rows import Rows, concat
from rlkit.batch.store import Column
from rlkit.checks import whole
from rlkit.metrics import reduce_metrics
from rlkit.types import LossFn

TOKEN_BUDGET = 8192
"""Tokens of a micro-batch, at most."""

CHECKED = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "returns", "values")


def per_token(worker: Any, batch: Batch, name: str) -> Column:
    """A column [B, T] of what a worker's model says of this rank's share of the rows."""
    context = worker.context
    mine = batch.shard(context.dp_rank, context.dp_size)
    local = mine.load()
    check_tokens(local, worker.spec.vocab_size)
    place = {uid: i for i, uid in enumerate(mine.uids.tolist())}
    pieces = local.microbatches(worker.token_budget)
    found = forward_all(worker.backend, pieces)
    if not context.speaks:
        return Column(name, batch.store, mine.uids, [])
    if not found:
        rows = Rows(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    else:
        order = np.argsort(
            [place[uid] for piece in pieces for uid in piece.uids.tolist()], kind="stable"
        )
        rows = concat(found, name=name).select(torch.from_numpy(order))
    return Column(name, batch.store, mine.uids, [batch.store.put(name, mine.uids, rows)])


def forward_all(backend: Any, pieces: list[Batch]) -> list[Rows]:
    """``backend.forward`` of each; one that cuts the model takes all at once and overlaps them."""
    if hasattr(backend, "forward_all"):
        return [found for found, _ in backend.forward_all(pieces)]
    return [backend.forward(piece)[0] for piece in pieces]


def forward_backward_all(
    backend: Any, pieces: list[Batch], loss_fn: LossFn
) -> list[dict[str, Tensor]]:
    """``backend.forward_backward`` of each, likewise."""
    if hasattr(backend, "forward_backward_all"):
        return backend.forward_backward_all(pieces, loss_fn)
    return [backend.forward_backward(piece, loss_fn) for piece in pieces]


def check_call(batch: Batch, loss_fn: Callable[..., Any], epochs: int) -> None:
    """Errors of an update that can be told before any work."""
    if not len(batch):
        raise ValueError("update: got an empty batch, need at least one row.")
    whole("epochs", epochs)
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: got {type(loss_fn).__name__}, need a function (logprobs [B, T], batch) -> "
            "(loss, metrics), for a critic (values [B, T], batch)."
        )
    names = list(inspect.signature(loss_fn).parameters)
    if len(names) < 2:
        raise TypeError(f"loss_fn: got parameters {names}, need (logprobs, batch).")


def check_finite(batch: Batch) -> None:
    """ValueError if a column that a loss reads holds NaN or infinity under the mask, or if the
    mask is none.

    Names column, uid and token.
    """
    if "response_mask" in batch:
        check_mask("response_mask", batch["response_mask"])
    for name in CHECKED:
        if name not in batch.columns:
            continue
        values = batch[name]
        if isinstance(values, list):
            kind = type(next(iter(values), None)).__name__
            raise TypeError(f"{name}: got rows of {kind}, need numbers, one a response token.")
        bad = ~torch.isfinite(values)
        if values.ndim == 2 and "response_mask" in batch:
            bad &= batch["response_mask"].bool()
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: got {values[tuple(where)].item()} in the row of uid "
                f"{int(batch.uids[where[0]])}{f', token {where[1]}' if len(where) > 1 else ''}; "
                "need finite numbers under the response mask. Look at the stage that wrote it, or "
                "drop the row with batch.select."
            )


def check_tokens(batch: Batch, vocab_size: int) -> None:
    """ValueError for an empty prompt, or a token that the model does not have: told before ranks
    wait for each other.
    """
    for name in ("prompt_ids", "response_ids"):
        rows = batch._column(name).load(batch.uids)
        lengths, ids = rows.row_lengths, rows.tensor
        bad = (ids < 0) | (ids >= vocab_size)
        if bool(bad.any()):
            place = int(bad.nonzero()[0])
            uid = batch.uids[int((lengths.cumsum(0) <= place).sum())]
            raise ValueError(
                f"{name}: got token {int(ids[place])} in the row of uid {uid}, need 0 to "
                f"{vocab_size - 1}, the model's vocabulary. Encode with the model's own tokenizer."
            )
        if name == "prompt_ids" and len(batch) and int(lengths.min()) < 1:
            raise ValueError(
                f"prompt_ids: got an empty prompt in the row of uid {batch.uids[lengths.argmin()]},"
                " need at least one token to predict the response from."
            )


def add_up(shares: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches as one."""
    return reduce_metrics([{name: float(x) for name, x in share.items()} for share in shares])


def average(records: list[dict[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps; maxima and minima stay such."""
    return {
        name: value if name.endswith(("_max", "_min")) else value / len(records)
        for name, value in reduce_metrics(records).items()
    }


def mix(seed: int, version: int, epoch: int) -> int:
    """Seed of the shuffle of one epoch of one update."""
    return (seed * 1_000_003 + version) * 1_009 + epoch


def callable_backend(backend: Any) -> Callable[..., Any]:
    """What makes a backend; TypeError for a name, or options alone."""
    if not callable(backend):
        raise TypeError(
            f"backend: got {backend!r}, need a class such as rk.MegatronBackend; "
            "functools.partial(rk.MegatronBackend, options=...) gives it options."
        )
    return backend
