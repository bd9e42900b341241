"""Errors of waits in vain: which rows, which columns, which stage is at fault."""

from collections.abc import Mapping

import numpy as np

from rlkit.columns import WRITTEN_BY
from rlkit.dock.messages import Shortage
from rlkit.dock.transport import Transport


def few(uids: np.ndarray) -> str:
    """At most five uids, and how many more."""
    shown = ", ".join(map(str, uids[:5].tolist()))
    return shown + (f" and {len(uids) - 5} more" if len(uids) > 5 else "")


def rows(n: int) -> str:
    """``1 row``, ``2 rows``."""
    return f"{n} row" if n == 1 else f"{n} rows"


def who(leased: Mapping[str, np.ndarray]) -> str:
    """Who holds how many rows: ``actor/0 has 4 rows (uids 1, 2, 3, 4)``."""
    said = [f"{h} has {rows(len(u))} (uids {few(u)})" for h, u in sorted(leased.items())]
    return "; ".join(said) or "nobody has any"


def no_room(short: Shortage, uids: np.ndarray) -> TimeoutError:
    """The error of a ``put`` that waited for room."""
    return TimeoutError(
        f"put: no room for {rows(len(uids))} (uids {few(uids)}) within {short.waited_s:.1f} s: "
        f"{rows(short.rows)} wait for stage {short.stage!r}; of them, {who(short.leased)}. Run "
        "that stage, or give the dock a larger capacity."
    )


def short_of(transport: Transport, short: Shortage, what: str) -> TimeoutError:
    """The error of a ``get`` or ``fetch``; asks the stages at fault who has the missing rows."""
    asked = f"{rows(short.n)} with columns {list(short.columns)}"
    said = [f"{what}: stage {short.stage!r} got no {asked} within {short.waited_s:.1f} s."]
    if what == "get":
        said.append(
            f"Of {rows(short.rows)} that it may still have, {short.ready} have all of them; "
            f"leased from it: {who(short.leased)}."
        )
    for column, uids in short.missing.items():
        said.append(_missing(transport, short, column, uids))
    unknown = [name for name in short.columns if name not in short.writers]
    if unknown:
        said.append(f"No row has {unknown}; there are {sorted(short.writers)}.")
    if short.gone:
        said.append(f"Rows {few(np.asarray(short.gone))} were consumed by all stages, or cleared.")
    if what == "get" and not short.missing:
        said.append(
            "No column is missing: more rows must be put, or the sampler leaves out what is ready "
            "(incomplete groups, stale rows)."
        )
    return TimeoutError(" ".join(said))


def _missing(transport: Transport, short: Shortage, column: str, uids: np.ndarray) -> str:
    """Which rows lack a column, who writes it, and who works on those rows."""
    stage = transport.graph.writer(column) if transport.graph else None
    stage = stage or short.writers.get(column)
    said = f"{rows(len(uids))} without {column!r} (uids {few(uids)})"
    if stage is None:
        return f"{said}; it is written by {WRITTEN_BY.get(column, 'a stage of yours')}: run it."
    if stage not in transport.stages():
        return f"{said}; stage {stage!r} writes it: run it on them."
    told = transport.controllers("holders", {stage: (uids,)})[stage].value
    work = f"{who(told)}." if told else "nobody has leased them from it: is it running?"
    return f"{said}; stage {stage!r} writes it, and {work}"
