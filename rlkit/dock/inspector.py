"""Looking into a dock: rows x columns, states by stage, versions."""

from typing import Any

import numpy as np

from rlkit.dock.recovery import on_nodes, on_stages
from rlkit.dock.rowtable import RowTable
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Transport
from rlkit.html import table


def frame(transport: Transport) -> Any:
    """DataFrame, a row a sample, in order of uid: uid, group, version, partition, bytes; for each
    column the node that has it, or "empty"; for each stage ``stage:NAME``: "waiting", "leased by
    HOLDER" or "consumed".
    """
    return _frame(on_stages(transport, "view"), None)


def _frame(views: dict[str, tuple[RowTable, dict[int, list[str]]]], limit: int | None) -> Any:
    """The first ``limit`` rows of ``frame``."""
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    rows = views[DRIVER][0]
    at = np.argsort(rows["uid"])[:limit]
    data: dict[str, Any] = {name: rows[name][at] for name in ("uid", "group", "version")}
    data["partition"] = np.asarray(rows.partitions, dtype=object)[rows["partition"][at]]
    data["bytes"] = sum((rows["nbytes", name][at] for name in rows.columns), np.zeros(len(at), int))
    for name in rows.columns:  # code -1, the last name, is that of no node
        data[name] = np.asarray([*rows.nodes, "empty"], dtype=object)[rows["node", name][at]]
    for stage, (seen, holders) in views.items():
        if stage != DRIVER:
            data[f"stage:{stage}"] = _states(seen, holders, data["uid"])
    return pd.DataFrame(data)


def _states(seen: RowTable, holders: dict[int, list[str]], uids: np.ndarray) -> np.ndarray:
    """What a stage says of each row."""
    said = np.full(len(uids), "unknown", dtype=object)
    at, there = seen.find(uids)
    if there.any():
        token, consumed = seen["token"][at], seen["consumed"][at] == 1
        said[there] = "waiting"
        for number, names in holders.items():
            said[there & (token == number)] = f"leased by {', '.join(names)}"
        said[there & consumed] = "consumed"
    return said


def title(name: str, transport: Transport) -> str:
    """One line: rows, bytes, nodes, stages."""
    stats = list(on_nodes(transport, "stats").values())
    rows: RowTable = transport.controllers("view", {DRIVER: ()})[DRIVER].value[0]
    stages = [stage for stage in transport.stages() if stage != DRIVER]
    nbytes = sum(of["nbytes"] for of in stats)
    return f"{name}({len(rows)} rows, {nbytes:,} bytes on {len(stats)} nodes, stages {stages})"


def html(name: str, transport: Transport) -> str:
    """The first rows as a table, and how many rows there are of each version."""
    views = on_stages(transport, "view")
    rows = views[DRIVER][0]
    found, counts = np.unique(rows["version"], return_counts=True)
    versions = [
        {"version": int(v), "rows": int(n), "": "█" * max(1, round(20 * n / counts.max()))}
        for v, n in zip(found, counts, strict=True)
    ]
    shown = _frame(views, 10).to_dict("records")
    more = f"<p>and {len(rows) - 10} more</p>" if len(rows) > 10 else ""
    return table(title(name, transport), shown) + more + table("policy versions", versions)
