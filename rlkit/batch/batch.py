"""Batch: named columns of B rows over a row store.

A batch is names, not tensors: it holds uids, groups and versions, and for each column where its
values lie. Reading ``batch["rewards"]`` fetches that column; binding ``batch["rewards"] = x``
writes it (or, for a column, names it). Every [B, T] column is indexed by response token: entry
``t`` speaks of ``response_ids[:, t]``.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlkit.batch import planning
from rlkit.batch.columns import META, SHAPES, Applied, check_shape
from rlkit.batch.store import Column, Part
from rlkit.batch.table import ColumnTable
from rlkit.checks import whole
from rlkit.html import table

logger = logging.getLogger("rlkit.batch")

MAX_SAMPLES = 1 << 16  # of one prompt: a uid is the group id and the sample's number


class Batch(ColumnTable):
    """B rows of named columns, and how they are cut into steps.

    Made by tasks, by ``rollout.generate`` and by ``Batch.from_columns``.
    """

    step_tokens: int | None = None
    """Trainable tokens of the optimizer step that this batch is a part of."""
    step_rows: int | None = None
    """Rows of that step."""

    def select(self, index: Any) -> "Batch":
        """Rows by position (ints) or by a boolean mask [B]; columns and denominators stay."""
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise ValueError(f"select: got a mask of shape {index.shape}, need [{len(self)}].")
            index = np.flatnonzero(index)
        elif index.size and not np.issubdtype(index.dtype, np.integer):
            raise TypeError(
                f"select: got positions of {index.dtype}, need integers, or a mask [{len(self)}] "
                "of bool: mask.bool()."
            )
        index = index.astype(np.int64).reshape(-1)
        bad = index[(index < -len(self)) | (index >= len(self))]
        if len(bad):
            raise IndexError(
                f"select: got position {bad[0]}, need at most {len(self) - 1}, or from the end at "
                f"least {-len(self)}."
            )
        index = index % max(len(self), 1)
        rows, counts = np.unique(index, return_counts=True)
        if (counts > 1).any():
            raise ValueError(
                f"select: got row {rows[counts > 1][0]} twice, need each row once. A mask of 0 and "
                "1 must be one of bool: mask.bool()."
            )
        return self._derive(index)

    def _derive(self, index: np.ndarray) -> "Batch":
        out = super()._derive(index)
        out.step_tokens, out.step_rows = self.step_tokens, self.step_rows
        return out

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Rows of several batches of one store, one after another.

        They must have the same columns.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("concat: got no batches, need at least one.")
        first = batches[0]
        for other in batches[1:]:
            if set(other.columns) != set(first.columns):
                raise ValueError(
                    "concat: got columns that differ: "
                    f"{sorted(set(other.columns) ^ set(first.columns))}; "
                    "need the same columns in each batch."
                )
        meta = {name: np.concatenate([b.meta[name] for b in batches]) for name in META}
        columns: dict[str, Column] = {}
        for name, column in first.columns.items():
            parts: list[Part] = []
            for batch in batches:  # of each column the rows of its own batch, no others
                own = batch.columns[name].on(column.store)
                wanted, _ = own.requests(batch.uids)
                parts += [part.restrict(uids) for part, uids in wanted]
            columns[name] = Column(name, column.store, meta["uid"], parts, expands=column.expands)
        out = Batch(
            meta["uid"],
            store=first.store,
            group_ids=meta["group_ids"],
            policy_version=meta["policy_version"],
            columns=columns,
        )
        if all(b.draws is first.draws for b in batches):
            out.draws = first.draws
        for b in batches:
            out.draws |= {g: max(num, out.draws.get(g, 0)) for g, num in b.draws.items()}
        return out

    def groups(self) -> Iterator["Batch"]:
        """One batch a group (the responses of one prompt), in order of first appearance."""
        for index in planning.by_group(self.meta["group_ids"]):
            yield self._derive(index)

    def minibatches(self, num: int, *, seed: int = 0) -> list["Batch"]:
        """Cut whole groups, shuffled by ``seed``, into ``num`` optimizer steps.

        Sets each step's denominators.
        """
        cut = planning.cut_groups(self.meta["group_ids"], num, seed=seed)
        return [self._derive(index).as_step() for index in cut]

    def as_step(self) -> "Batch":
        """The same rows as one optimizer step: its token and row counts become the denominators."""
        out = self._derive(np.arange(len(self)))
        out.step_tokens, out.step_rows = int(self.num_trainable.sum()), len(self)
        return out

    def microbatches(self, token_budget: int) -> list["Batch"]:
        """Cut rows into pieces of at most ``token_budget`` prompt + response tokens (a longer row
        stands alone).
        """
        return [self._derive(index) for index in planning.fill(self.num_tokens, token_budget)]

    def chunks(self, size: int, *, drop_last: bool = False) -> list["Batch"]:
        """Consecutive pieces of ``size`` rows, each an optimizer step of its own.

        The last is shorter if the rows don't divide; ``drop_last`` leaves it out and logs how many.
        """
        size = whole("chunks", size, what="row")
        left = len(self) % size if drop_last else 0
        if left:
            logger.warning("chunks: the last %d of %d rows are left out", left, len(self))
        starts = range(0, len(self) - left, size)
        pieces = [np.arange(start, min(start + size, len(self))) for start in starts]
        return [self._derive(piece).as_step() for piece in pieces]

    def shard(self, rank: int, size: int) -> "Batch":
        """This data-parallel rank's rows, balanced over ``size`` ranks by tokens.

        Denominators stay.
        """
        if size == 1:
            return self
        return self._derive(planning.balance(self.num_tokens, size)[rank])

    def fresh(self) -> "Batch":
        """The same rows as if nothing had been sampled of them: ``reserve`` counts from 0 again."""
        out = self._derive(np.arange(len(self)))
        out.draws = {}
        return out

    def reserve(self, num: int) -> np.ndarray:
        """[B] int64: first sample number of each row's group, taking ``num`` of them.

        Rows drawn again get new uids.
        """
        first = np.zeros(len(self), dtype=np.int64)
        for i, group in enumerate(self.meta["group_ids"].tolist()):
            first[i] = self.draws.get(group, 0)
            self.draws[group] = int(first[i]) + num
            if self.draws[group] > MAX_SAMPLES:
                raise ValueError(
                    f"group {group}: got {self.draws[group]} samples of one prompt, need at most "
                    f"{MAX_SAMPLES}."
                )
        return first

    def apply(self, fn: Callable[..., Any], *names: str, whole_groups: bool = False) -> Column:
        """Run ``fn`` on the named columns where they lie; a column of what it returns ([B], [B, T]
        or a list of B).

        The store may call it on some of the rows at a time: with ``whole_groups`` never on a part
        of a group.
        """
        for name in names:
            if name not in META:
                self._column(name)
        rows = self._derive(np.arange(len(self)))  # a column still being computed need not be sent
        needed = {*names, *SHAPES}
        rows.columns = {name: column for name, column in self.columns.items() if name in needed}
        return self.store.apply(
            Applied(fn, names, whole_groups), rows, getattr(fn, "__name__", "apply")
        )

    # ---- means with the step's denominators ----

    def token_mean(self, x: Float[Tensor, "B T"]) -> Float[Tensor, ""]:
        """Sum of x [B, T] under the response mask over the trainable tokens of the whole optimizer
        step.

        Micro-batches and data-parallel ranks hold parts of the step: their results add up to its
        mean. Outside a step the denominator is this batch's own count. Nothing trainable gives 0.
        """
        mask = self["response_mask"].bool()
        check_shape("token_mean", x, mask.shape)
        count = int(self.num_trainable.sum()) if self.step_tokens is None else self.step_tokens
        return torch.where(mask, x, torch.zeros_like(x)).sum() / max(count, 1)

    def seq_mean(self, x: Float[Tensor, "B *T"]) -> Float[Tensor, ""]:
        """Sum over rows of x [B], or of the masked mean of each row of x [B, T], over the rows of
        the whole step.
        """
        if x.ndim == 2:
            mask = self["response_mask"].to(x.dtype)
            check_shape("seq_mean", x, mask.shape)
            x = torch.where(mask > 0, x, torch.zeros_like(x)).sum(1) / mask.sum(1).clamp(min=1)
        check_shape("seq_mean", x, (len(self),))
        count = len(self) if self.step_rows is None else self.step_rows
        return x.sum() / max(count, 1)

    # ---- looking ----

    def frame(self) -> Any:
        """DataFrame, a row a response: identity, lengths, text and every [B] column (fetched)."""
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        data: dict[str, Any] = dict(self.meta)
        for name, column in self.columns.items():
            if column.parts[0].kind != "ragged":
                values = column.load(self.uids).values
                data[name] = values if isinstance(values, list) else values.tolist()  # pyright: ignore[reportUnknownMemberType]
            elif name.endswith("_ids"):
                data[name.removesuffix("_ids") + "_tokens"] = self.lengths(name)
        return pd.DataFrame(data)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows, columns {sorted(self.columns)})"

    def _repr_html_(self) -> str:
        groups = len(np.unique(self.meta["group_ids"]))
        facts = [c.facts() | {"column": name} for name, c in sorted(self.columns.items())]
        return table(f"Batch: {len(self)} rows, {groups} groups", facts, limit=30)
