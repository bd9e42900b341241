"""View: what a stage's controller shows of its rows, small however many there are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlkit.dock.leases import Leases
from rlkit.dock.messages import codes_in
from rlkit.dock.rowtable import RowTable


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The first rows by uid, and counts of all rows."""

    table: RowTable
    holders: Mapping[int, Sequence[str]]
    """Token -> holders of the open leases that have some rows of ``table``."""
    num_rows: int
    num_leased: int
    num_consumed: int
    leased: Mapping[str, int]
    """Holder -> rows it has."""
    versions: Mapping[int, int]
    """Policy version -> rows."""
    nbytes: Mapping[str, int]
    """Node -> bytes."""

    @classmethod
    def of(cls, table: RowTable, leases: Leases, limit: int | None) -> "View":
        """A stage's view of its table and leases."""
        first, nbytes = table.first(limit), dict.fromkeys(table.nodes, 0)
        shown, consumed = set(first["token"].tolist()), table["consumed"] == 1
        for name in table.columns:
            where = table["node", name]
            for code in codes_in(where):
                nbytes[table.nodes[code]] += int(table["nbytes", name][where == code].sum())
        versions, counts = np.unique(table["version"], return_counts=True)
        return cls(
            table=first,
            holders={
                held.token: sorted(filter(None, held.seats))
                for held in leases.open_ones()
                if held.token in shown
            },
            num_rows=len(table),
            num_leased=int(((table["token"] > 0) & ~consumed).sum()),
            num_consumed=int(consumed.sum()),
            leased={holder: len(uids) for holder, uids in leases.rows_by_holder().items()},
            versions=dict(zip(versions.tolist(), counts.tolist(), strict=True)),
            nbytes=nbytes,
        )
