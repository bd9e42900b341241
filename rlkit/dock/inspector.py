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
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    views = on_stages(transport, "view")
    rows: RowTable = views[DRIVER][0]
    data: dict[str, Any] = {
        "uid": rows["uid"],
        "group": rows["group"],
        "version": rows["version"],
        "partition": np.asarray(rows.partitions, dtype=object)[rows["partition"]],
        "bytes": sum((rows["nbytes", name] for name in rows.columns), np.zeros(len(rows), int)),
    }
    for name in rows.columns:  # code -1, the last name, is that of no node
        data[name] = np.asarray([*rows.nodes, "empty"], dtype=object)[rows["node", name]]
    for stage, (seen, holders) in views.items():
        if stage != DRIVER:
            data[f"stage:{stage}"] = _states(seen, holders, rows["uid"])
    return pd.DataFrame(data).sort_values("uid", ignore_index=True)


def _states(seen: RowTable, holders: dict[int, list[str]], uids: np.ndarray) -> list[str]:
    """What a stage says of each row."""
    at, there = seen.find(uids)
    found = []
    for i, known in zip(at.tolist(), there.tolist(), strict=True):
        if not known:
            found.append("unknown")
        elif seen["consumed"][i]:
            found.append("consumed")
        elif token := int(seen["token"][i]):
            found.append(f"leased by {', '.join(holders.get(token, []))}")
        else:
            found.append("waiting")
    return found


def title(name: str, transport: Transport) -> str:
    """One line: rows, bytes, nodes, stages."""
    stats = on_nodes(transport, "stats")
    nbytes = sum(of["nbytes"] for of in stats.values())
    rows: RowTable = transport.controllers("view", {DRIVER: ()})[DRIVER].value[0]
    stages = [stage for stage in transport.stages() if stage != DRIVER]
    return f"{name}({len(rows)} rows, {nbytes:,} bytes on {len(stats)} nodes, stages {stages})"


def html(name: str, transport: Transport) -> str:
    """The first rows as a table, and how many rows there are of each version."""
    shown = frame(transport)
    versions = shown.groupby("version").size()
    counts = [{"version": v, "rows": n, "": "█" * max(1, round(20 * n / versions.max()))}
              for v, n in versions.items()]  # fmt: skip
    rows = shown.to_dict("records")
    return table(title(name, transport), rows) + table("policy versions", counts)
