"""Looking into a dock: rows x columns, states by stage, bytes by node, versions."""

import html
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlkit.dock.messages import ClosedError
from rlkit.dock.recovery import on_stages
from rlkit.dock.traffic import DRIVER
from rlkit.dock.transport import Transport
from rlkit.dock.values import OF_FRAME
from rlkit.dock.view import View
from rlkit.html import table

SHOWN = 10
"""Rows that a dock shows of itself."""
COLOURS = {
    "empty": "#eceef1",
    "ready": "#3f90da",
    "waiting": "#bcd9f2",
    "leased": "#e76300",
    "consumed": "#4d4f57",
}
"""As ``rk.viz.plot_dock`` draws them; blue, orange and greys are told apart by all eyes."""
NODE_ID = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{48}\b")
IDENTITY = ("uid", *OF_FRAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The first rows of a dock and counts of all of them, at one moment; draws itself."""

    title: str
    frame: Any
    """As ``dock.frame()``."""
    num_rows: int = 0
    stages: tuple[Mapping[str, Any], ...] = ()
    """Of each stage: rows waiting, leased, consumed, and who has how many."""
    nodes: tuple[Mapping[str, Any], ...] = ()
    versions: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    """Why this is an old look, or none."""
    gone: bool = False
    """Whether the dock was closed: no look will ever be newer."""
    at_s: float = 0.0

    def shown(self) -> list[dict[str, Any]]:
        """At most 10 rows, long names of nodes cut short."""
        rows = self.frame.head(SHOWN).to_dict("records")
        return [{k: short(v) for k, v in row.items() if not bytes_of(k)} for row in rows]

    def __repr__(self) -> str:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

        tables = (self.shown(), self.stages, self.nodes if len(self.nodes) > 1 else ())
        said = [pd.DataFrame(list(rows)).to_string(index=False) for rows in tables if rows]
        said[1:1] = [f"and {self.num_rows - SHOWN} more"] if self.num_rows > SHOWN else []
        versions = ", ".join(f"{each['version']}: {each['rows']}" for each in self.versions[:SHOWN])
        said += [f"rows by policy version: {versions}"] if versions else []
        return "\n".join([self.title, *filter(None, [self.note]), *said])

    def _repr_html_(self) -> str:
        note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
        more = f"<p>and {self.num_rows - SHOWN} more</p>" if self.num_rows > SHOWN else ""
        key = " ".join(
            f'<span style="{_style("stage:", name)}">&nbsp;{name}&nbsp;</span>' for name in COLOURS
        )
        said = [table(self.title, self.shown(), style=_style), more, key if self.shown() else ""]
        said += [f"<br>{table('stages', self.stages)}"] if self.stages else []
        said += [table("bytes by node", self.nodes)] if len(self.nodes) > 1 else []
        return note + "".join([*said, table("policy versions", self.versions)])


class Inspector:
    """Looks at a dock, each time with one small question that may take so long and no longer."""

    def __init__(self) -> None:
        self._last: Look | None = None
        self._late: _Question | None = None

    def __reduce__(self) -> Any:
        return Inspector, ()  # another process looks for itself

    def look(self, name: str, transport: Transport, limit: int, timeout_s: float) -> Look:
        """The dock now, or the last look with a note that says why."""
        asked = self._late
        try:
            if asked is None or not asked.is_alive():  # else it hangs, and so would another one
                self._keep(asked)
                asked = _Question(name, transport, limit)
                asked.start()
            asked.join(timeout_s)
        except Exception as error:  # no thread to be had: a look never raises
            asked = _Question(name, transport, limit)
            asked.error = error
        self._late = asked
        if asked.found is not None:
            return self._keep(asked)
        why = f"no answer of the controllers within {timeout_s:g} s"
        if asked.error is not None:
            why = f"{type(asked.error).__name__}: {asked.error}".rstrip(".")
        last, note = self._last, f"{why}. Nothing is known of the rows."
        if last is None:
            import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

            last = Look(title=f"{name}(no answer)", frame=pd.DataFrame())
        else:
            note = f"{why}. This is the look of {time.monotonic() - last.at_s:.0f} s ago."
        return replace(last, note=note, gone=isinstance(asked.error, ClosedError))

    def _keep(self, asked: "_Question | None") -> Any:
        """Remember the answer, which may have come late."""
        if asked is not None and asked.found is not None:
            self._last = asked.found
        return self._last


class _Question(threading.Thread):
    """One look, in a thread that does not keep the process alive."""

    def __init__(self, name: str, transport: Transport, limit: int) -> None:
        super().__init__(name=f"look at a {name}", daemon=True)
        self._ask = name, transport, limit
        self.found: Look | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.found = _look(*self._ask)
        except Exception as error:  # whatever it is, it is shown in the look's place
            self.error = error


def frame(transport: Transport) -> Any:
    """DataFrame, a row a sample, in order of uid: uid, group, version, partition, bytes; for each
    column the node that has it, or "empty"; for each node ``bytes:NODE``; for each stage
    ``stage:NAME``: "waiting", "leased by HOLDER" or "consumed".
    """
    return _frame(on_stages(transport, "view"))


def _look(name: str, transport: Transport, limit: int) -> Look:
    views: dict[str, View] = on_stages(transport, "view", limit)
    of, stages = views[DRIVER], {s: view for s, view in views.items() if s != DRIVER}
    nbytes, most = sum(of.nbytes.values()), max(of.versions.values(), default=1)
    return Look(
        title=(
            f"{name}({of.num_rows} rows, {nbytes:,} bytes on {len(transport.nodes)} nodes, "
            f"stages {list(stages)})"
        ),
        frame=_frame(views),
        num_rows=of.num_rows,
        stages=tuple(_counts(stage, view) for stage, view in stages.items()),
        nodes=tuple({"node": short(n), "bytes": f"{b:,}"} for n, b in of.nbytes.items()),
        versions=tuple(
            {"version": version, "rows": n, "": "█" * max(1, round(20 * n / most))}
            for version, n in of.versions.items()
        ),
        at_s=time.monotonic(),
    )


def _counts(stage: str, view: View) -> dict[str, Any]:
    """How many rows a stage waits for, has out and is done with, and the holders with most."""
    held = sorted(view.leased.items(), key=lambda item: (-item[1], item[0]))
    said = ", ".join(f"{short(holder)} ({n})" for holder, n in held[:3])
    return {
        "stage": stage,
        "waiting": view.num_rows - view.num_leased - view.num_consumed,
        "leased": view.num_leased,
        "consumed": view.num_consumed,
        "leased by": said + (f" and {len(held) - 3} more" if len(held) > 3 else ""),
    }


def _frame(views: Mapping[str, View]) -> Any:
    import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

    rows = views[DRIVER].table
    data: dict[str, Any] = {name: rows[name] for name in ("uid", "group", "version")}
    data["partition"] = np.asarray(rows.partitions, dtype=object)[rows["partition"]]
    data["bytes"] = sum((rows["nbytes", name] for name in rows.columns), np.zeros(len(rows), int))
    for name in rows.columns:  # code -1, the last name, is that of no node
        data[name] = np.asarray([*rows.nodes, "empty"], dtype=object)[rows["node", name]]
    for code, node in enumerate(rows.nodes):
        there = [rows["nbytes", name] * (rows["node", name] == code) for name in rows.columns]
        data[f"bytes:{node}"] = sum(there, np.zeros(len(rows), int))
    for stage, view in views.items():
        if stage != DRIVER:
            data[f"stage:{stage}"] = _states(view, data["uid"])
    return pd.DataFrame(data)


def _states(view: View, uids: np.ndarray) -> np.ndarray:
    """What a stage says of each row."""
    said = np.full(len(uids), "unknown", dtype=object)
    at, there = view.table.find(uids)
    if there.any():
        token, consumed = view.table["token"][at], view.table["consumed"][at] == 1
        said[there] = "waiting"
        for number, names in view.holders.items():
            said[there & (token == number)] = f"leased by {', '.join(names)}"
        said[there & consumed] = "consumed"
    return said


def bytes_of(name: str) -> str:
    """The node of a frame's column ``bytes:NODE``, else nothing."""
    return name.removeprefix("bytes:") if name.startswith("bytes:") else ""


def short(value: Any) -> Any:
    """Ray's names of nodes have 56 digits; 8 tell them apart."""
    return NODE_ID.sub(r"\1", value) if isinstance(value, str) else value


def _style(column: str, value: Any) -> str:
    """The colour of a cell that says where a value is, or what a stage does with a row."""
    state = str(value).split(" ")[0] if column.startswith("stage:") else "ready"
    if value == "empty":
        state = "empty"
    elif column in IDENTITY or state not in COLOURS:
        return ""
    return f"background:{COLOURS[state]};color:{'#fff' if state == 'consumed' else '#111'}"
