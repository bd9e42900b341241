"""ColumnTable: named columns of B rows over a row store, read and written by name."""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import numpy as np
import torch

from rlkit.batch.columns import (
    META,
    as_rows,
    bound_rows,
    check_lengths,
    check_name,
    int_array,
    missing,
)
from rlkit.batch.rows import Rows
from rlkit.batch.store import Column, LocalStore, join
from rlkit.types import RowStore

logger = logging.getLogger("rlkit.batch")


class ColumnTable:
    """B rows: who they are, and for each named column where its values lie."""

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
        self.device: torch.device | str = "cpu"
        # Samples taken of each group; shared by the tables cut from this one.
        self.draws: dict[int, int] = {}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, store: RowStore | None = None) -> Self:
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
            for old in values.outdated if name == "rewards" else ():
                self.columns.pop(old, None)
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
        try:
            values = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"expand: got {type(values).__name__} that is no tensor ({error}), need numbers "
                f"[{len(self)}], one a response."
            ) from error
        if tuple(values.shape) != (len(self),):
            raise ValueError(
                f"expand: got shape {tuple(values.shape)}, need [{len(self)}], one value a "
                "response. What has a value a token is bound as it is."
            )
        part = self.store.put("expanded", self.uids, as_rows("expanded", values))
        return Column("expanded", self.store, self.uids, [part], expands=True)

    # ---- rows and where they are ----

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

    def _derive(self, index: np.ndarray) -> Self:
        out = type(self)(
            self.uids[index],
            store=self.store,
            group_ids=self.meta["group_ids"][index],
            policy_version=self.meta["policy_version"][index],
            columns=self.columns,
        )
        out.device, out.draws = self.device, self.draws
        return out

    def load(self, *, objects: bool = False) -> Self:
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

    def on(self, store: RowStore) -> Self:
        """The same rows with every column in ``store``.

        Columns that lie elsewhere are copied, once.
        """
        out = self._derive(np.arange(len(self)))
        out.store = store
        for name, column in self.columns.items():
            if column.store is not store and len(column.uids) != len(self):  # copy no other rows
                column = Column(name, column.store, self.uids, column.parts, expands=column.expands)
            out.columns[name] = column.on(store)
        return out
