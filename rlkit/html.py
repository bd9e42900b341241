"""Small tables for ``_repr_html_``: escaped, and short whatever they describe."""

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def table(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    limit: int = 10,
    style: Callable[[str, Any], str] = lambda column, value: "",
) -> str:
    """At most ``limit`` rows as an HTML table under a title; ``style(column, value)`` is CSS."""
    head = f"<b>{html.escape(title)}</b>"
    if not rows:
        return head
    names = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    lines = [
        "".join(_cell(value, style(str(key), value)) for key, value in row.items())
        for row in rows[:limit]
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = f"<p>and {len(rows) - limit} more</p>" if len(rows) > limit else ""
    return f"{head}<table><tr>{names}</tr>{body}</table>{more}"


def _cell(value: Any, style: str) -> str:
    css = f' style="{html.escape(style)}"' if style else ""
    return f"<td{css}>{html.escape(str(value))}</td>"
