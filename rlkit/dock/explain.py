"""Errors of waits in vain: which rows, which columns, which stage is at fault."""

from collections.abc import Mapping

import numpy as np

from rlkit.batch.columns import WRITTEN_BY
from rlkit.checks import did_you_mean
from rlkit.dock.messages import Shortage
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Transport
from rlkit.dock.values import few


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
    if short.unknown:
        said.append(f"Nobody has put rows {few(np.asarray(short.unknown))}.")
    if short.gone:
        said.append(f"Rows {few(np.asarray(short.gone))} were consumed by all stages, or cleared.")
    if what == "get" and not short.missing and not unknown:
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
        known = {*short.writers, *WRITTEN_BY}
        near = "" if column in known else did_you_mean(column, known)
        writer = WRITTEN_BY.get(column, "a stage of yours")
        return f"{said}; it is written by {writer}: run it.{near}"
    if stage == DRIVER:
        return f"{said}; the driver puts it: put it for them, too."
    if stage not in transport.stages():
        return f"{said}; stage {stage!r} writes it: run it on them."
    done = np.intersect1d(uids, transport.controllers("consumed", {stage: ()})[stage].value)
    if len(done):
        return (
            f"{said}; stage {stage!r} writes it, and acknowledged {few(done)} without having "
            "written it: put it for them, or clear them."
        )
    told = transport.controllers("holders", {stage: (uids,)})[stage].value
    work = f"{who(told)}." if told else "nobody has leased them from it: is it running?"
    return f"{said}; stage {stage!r} writes it, and {work}{_waits(transport, short, stage)}"


def _waits(transport: Transport, short: Shortage, stage: str) -> str:
    """What a stage itself waits for: columns that no row has."""
    graph = transport.graph
    if graph is None:
        return ""
    reads = next((s.reads for s in graph.stages if s.name == stage), ())
    absent = [f"{c!r} of stage {graph.writer(c)!r}" for c in reads if c not in short.writers]
    return f" It needs {', '.join(absent)}, which no row has." if absent else ""
