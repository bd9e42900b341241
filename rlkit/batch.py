"""Batch: named columns of B rows over a row store.

A batch is names, not tensors: it holds uids, groups and versions, and for each column where its
values lie. Reading ``batch["rewards"]`` fetches that column; binding ``batch["rewards"] = x``
writes it (or, for a column, names it). Every [B, T] column is indexed by response token: entry
``t`` speaks of ``response_ids[:, t]``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rlkit import planning
from rlkit.checks import whole
from rlkit.columns import (
    META,
    Applied,
    as_rows,
    bound_rows,
    check_lengths,
    check_name,
    check_shape,
    int_array,
    missing,
)
from rlkit.html import table
from rlkit.rows import Rows
from rlkit.store import Column, LocalStore, Part, join
from rlkit.types import RowStore

logger = logging.getLogger("rlkit.batch")

MAX_SAMPLES = 1 << 16  # of one prompt: a uid is the group id and the sample's number


class Batch:
    """B rows of named columns.

    Made by tasks, by ``rollout.generate`` and by ``Batch.from_columns``.
    """

    def __init__(
        self,
        uids: np.ndarray,
        *,
        store: RowStore,
        group_ids: np.ndarray,
        policy_version: np.ndarray | None = None,
        columns: Mapping[str, Column] | None = None,
    ) -> None:
        if len(np.unique(uids)) != len(uids):
            raise ValueError(
                "uids: got the same uid twice, need one a row. Give new rows new uids."
            )
        self.uids = uids
        self.store = store
        self.meta = {
            "uid": uids,
            "group_ids": group_ids,
            "policy_version": np.zeros_like(uids) if policy_version is None else policy_version,
        }
        self.columns: dict[str, Column] = dict(columns or {})
        # Denominators of the optimizer step that this batch is a part of.
        self.step_tokens: int | None = None
        self.step_rows: int | None = None
        self.device: torch.device | str = "cpu"
        # Samples taken of each group; shared by the batches cut from this one.
        self.draws: dict[int, int] = {}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, store: RowStore | None = None) -> "Batch":
        """Build a batch from padded tensors [B] or [B, T], lists of B values, or lists of B 1-D
        tensors.

        ``uid``, ``group_ids``, ``policy_version`` [B] become the rows' identity (default: 0..B-1,
        one group a row, version 0). Ids give the lengths: other [B, T] tensors lose the padding
        beyond them. Padded ids keep their width.
        """
        if not columns:
            raise ValueError("columns: got none, need at least one named column.")
        sizes = {name: len(values) for name, values in columns.items()}
        num_rows = next(iter(sizes.values()))
        odd = {name: size for name, size in sizes.items() if size != num_rows}
        if odd:
            raise ValueError(
                f"columns: got {num_rows} rows in {next(iter(sizes))!r} but {odd}; need equally "
                "many in each."
            )
        meta = {name: int_array(name, columns[name]) for name in META if name in columns}
        uids = meta.get("uid", np.arange(num_rows))
        batch = cls(
            uids,
            store=store or LocalStore(),
            group_ids=meta.get("group_ids", uids),
            policy_version=meta.get("policy_version"),
        )
        names = [name for name in columns if name not in META]
        for name in sorted(names, key=lambda name: not name.endswith("_ids")):
            rows = as_rows if name.endswith("_ids") else partial(bound_rows, batch)
            batch._write(name, rows(name, columns[name]))
        batch.columns = {name: batch.columns[name] for name in names}
        return batch

    # ---- reading and writing columns ----

    def __getitem__(self, name: Any) -> Any:
        """Values of a column: tensor [B] or [B, T] padded with 0 on the right, or a list of B
        objects.
        """
        check_name(name)
        if name in META:
            return torch.from_numpy(self.meta[name].copy()).to(self.device)  # pyright: ignore[reportUnknownMemberType]
        if name == "prompt_mask" and name not in self.columns:  # follows from the lengths
            lengths = torch.from_numpy(self.lengths("prompt_ids"))  # pyright: ignore[reportUnknownMemberType]
            width = int(lengths.max()) if len(lengths) else 0
            return (torch.arange(width) < lengths[:, None]).long().to(self.device)
        column = self._column(name)
        rows = column.load(self.uids)
        if isinstance(rows.values, list):
            return list(rows.values)
        # A copy, never the store's own memory: the reader may write into it.
        values = rows.padded() if rows.lengths is not None else rows.values.clone()
        values = values.to(self.device)
        if column.expands:
            mask = self["response_mask"].bool()  # [B, T]
            return torch.where(
                mask, values[:, None], torch.zeros((), dtype=values.dtype, device=self.device)
            )
        return values

    def __setitem__(self, name: Any, values: Any) -> None:
        check_name(name)
        if name == "uid":
            raise ValueError(
                "uid: a batch keeps its uids, need a new batch for new ones: Batch.from_columns."
            )
        if name in META:
            self.meta[name] = int_array(name, values)
            if len(self.meta[name]) != len(self):
                raise ValueError(
                    f"{name}: got {len(values)} values, need {len(self)}, one a row of this batch."
                )
            return
        if name in self.columns:
            logger.info("column %r of %d rows is written again", name, len(self))
        if isinstance(values, Column):
            missing = np.setdiff1d(self.uids, values.uids)
            if len(missing):
                raise ValueError(
                    f"{name}: got a column without {len(missing)} of this batch's {len(self)} rows "
                    f"(first uid {missing[0]}); need one made from this batch or one that "
                    "contains it."
                )
            if not values.pending and values.parts and values.parts[0].kind == "ragged":
                check_lengths(self, name, values.measure(self.uids, "lengths"))
            self.columns[name] = values
        else:
            self._write(name, bound_rows(self, name, values))

    def __delitem__(self, name: str) -> None:
        self._column(name)
        del self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns or name in META

    def _column(self, name: str) -> Column:
        if name in self.columns:
            return self.columns[name]
        raise missing(name, self.columns)

    def _write(self, name: str, rows: Rows) -> None:
        part = self.store.put(name, self.uids, rows)
        self.columns[name] = Column(name, self.store, self.uids, [part])

    def expand(self, values: Any) -> Column:
        """[B] values, one a response, as a column that reads as [B, T].

        The value on each token of the mask, 0 elsewhere.
        """
        if isinstance(values, Column):
            return values.expanded()
        values = torch.as_tensor(values)
        if tuple(values.shape) != (len(self),):
            raise ValueError(
                f"expand: got shape {tuple(values.shape)}, need [{len(self)}], one value a "
                "response. What has a value a token is bound as it is."
            )
        part = self.store.put("expanded", self.uids, as_rows("expanded", values))
        return Column("expanded", self.store, self.uids, [part], expands=True)

    def apply(self, fn: Callable[..., Any], *names: str, whole_groups: bool = False) -> Column:
        """Run ``fn`` on the named columns where they lie; a column of what it returns ([B], [B, T]
        or a list of B).

        The store may call it on some of the rows at a time: with ``whole_groups`` never on a part
        of a group.
        """
        for name in names:
            if name not in META:
                self._column(name)
        return self.store.apply(
            Applied(fn, names, whole_groups), self, getattr(fn, "__name__", "apply")
        )

    # ---- rows ----

    def __len__(self) -> int:
        return len(self.uids)

    def lengths(self, name: str) -> np.ndarray:
        """[B] int64: tokens of each row of a ragged column (metadata, no fetch)."""
        return self._column(name).measure(self.uids, "lengths")

    @property
    def num_tokens(self) -> np.ndarray:
        """[B] int64: prompt + response tokens of each row."""
        total = np.zeros(len(self), dtype=np.int64)
        for name in ("prompt_ids", "response_ids"):
            if name in self.columns:
                total += self.lengths(name)
        return total

    @property
    def num_trainable(self) -> np.ndarray:
        """[B] int64: tokens of each row under the response mask."""
        return self._column("response_mask").measure(self.uids, "sums").astype(np.int64)

    def select(self, index: Any) -> "Batch":
        """Rows by position (ints) or by a boolean mask [B]; columns and denominators stay."""
        index = np.asarray(index)
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise ValueError(f"select: got a mask of shape {index.shape}, need [{len(self)}].")
            index = np.flatnonzero(index)
        index = index.astype(np.int64).reshape(-1)
        if len(index) and (index.min() < -len(self) or index.max() >= len(self)):
            raise IndexError(
                f"select: got positions up to {index.max()}, need at most {len(self) - 1}."
            )
        return self._derive(index)

    def _derive(self, index: np.ndarray) -> "Batch":
        out = Batch(
            self.uids[index],
            store=self.store,
            group_ids=self.meta["group_ids"][index],
            policy_version=self.meta["policy_version"][index],
            columns=self.columns,
        )
        out.step_tokens, out.step_rows, out.device = self.step_tokens, self.step_rows, self.device
        out.draws = self.draws
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

    def load(self, *, objects: bool = False) -> "Batch":
        """The same rows with every tensor column fetched into this process, in one round.

        Text and other lists stay where they are, but with ``objects``.
        """
        target, out = LocalStore(), self._derive(np.arange(len(self)))
        columns = {n: c for n, c in self.columns.items() if objects or c.parts[0].kind != "objects"}
        for store in {id(c.store): c.store for c in columns.values()}.values():
            mine = {name: c for name, c in columns.items() if c.store is store}
            plans = [column.requests(self.uids) for column in mine.values()]
            found = iter(store.fetch([item for wanted, _ in plans for item in wanted]))
            for (name, column), (wanted, order) in zip(mine.items(), plans, strict=True):
                rows = join([next(found) for _ in wanted], order, name=name)
                part = target.put(name, self.uids, rows)
                out.columns[name] = Column(name, target, self.uids, [part], expands=column.expands)
        return out

    def on(self, store: RowStore) -> "Batch":
        """The same rows with every column in ``store``.

        Columns that lie elsewhere are copied, once.
        """
        out = self._derive(np.arange(len(self)))
        out.store = store
        for name, column in self.columns.items():
            here = column.uids if len(column.uids) == len(self) else None
            needed = (
                column
                if here is not None or column.store is store
                else Column(name, column.store, self.uids, column.parts, expands=column.expands)
            )
            out.columns[name] = needed.on(store)
        return out

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
