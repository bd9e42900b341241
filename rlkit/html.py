"""Small tables for ``_repr_html_``: escaped, and short whatever they describe."""

import html
from collections.abc import Mapping, Sequence
from typing import Any


def table(title: str, rows: Sequence[Mapping[str, Any]], *, limit: int = 10) -> str:
    """At most ``limit`` rows as an HTML table under a title."""
    head = f"<b>{html.escape(title)}</b>"
    if not rows:
        return head
    names = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    lines = [
        "".join(f"<td>{html.escape(str(value))}</td>" for value in row.values())
        for row in rows[:limit]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>and {len(rows) - limit} more</p>" if len(rows) > limit else ""
    return f"{head}<table><tr>{names}</tr>{body}</table>{more}"
