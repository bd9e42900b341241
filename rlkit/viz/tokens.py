"""One response, token by token, on a background that shows a value: `show_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from rlkit.viz.style import ROLE_COLOURS

HIGH, LOW = ROLE_COLOURS["rollout"], ROLE_COLOURS["actor"]  # blue and orange: colour-blind safe
MAX_TOKENS = 4000
ON_HOVER = (
    "advantages",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_version",
)
VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "": "∅"}
GREY, MASKED = "opacity:.55", "opacity:.55;border-bottom:1px dashed currentColor"
NO_NUMBER = "background:repeating-linear-gradient(45deg,#fff,#fff 3px,#bbb 3px,#bbb 5px)"


@dataclass(frozen=True, slots=True)
class Derived:
    """Token values made of two columns."""

    columns: tuple[str, str]
    of: Callable[[np.ndarray, np.ndarray], np.ndarray]
    centre: float = 0.0
    advice: str = ""


DERIVED = {
    "ratio": Derived(
        ("logprobs", "old_logprobs"),
        lambda new, old: np.exp(new - old),
        centre=1.0,
        advice="After an update bind batch['logprobs'] = actor.compute_logprobs(batch). ",
    ),
    # k3 (Schulman, 2020), as rlkit.algo.kl_k3
    "kl": Derived(
        ("old_logprobs", "ref_logprobs"),
        lambda new, ref: np.maximum(np.expm1(ref - new) - (ref - new), 0.0),  # but for rounding
        advice="Bind batch['ref_logprobs'] = reference.compute_logprobs(batch). ",
    ),
    "engine_difference": Derived(
        ("old_logprobs", "rollout_logprobs"),
        lambda trainer, engine: trainer - engine,
        advice="Bind batch['old_logprobs'] = actor.compute_logprobs(batch). ",
    ),
}
"""Colours that are no columns: new over old probability; KL from the reference, estimated on each
token; trainer's minus engine's logprob."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A row of a batch as HTML; made by `show_tokens`, drawn by Jupyter."""

    html: str
    summary: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"TokenView({self.summary})"


def show_tokens(
    batch: Any, i: int, color: str = "advantages", *, tokenizer: Any = None
) -> TokenView:
    """Response ``i`` of a batch, each token on the colour of its value; values show on hover.

    ``color`` is a column of token values, [B, T], or one of ``ratio``, ``kl``,
    ``engine_difference``. White is 0, of a ratio 1, of whole numbers their smallest. Tokens outside
    the response mask are grey and underlined, the prompt is grey. Without a tokenizer the text is
    that of ``batch["response"]`` if it has one character a token, and else the ids.
    """
    row = _row(batch, i)
    ids = np.asarray(row["response_ids"])[0]  # [T]
    values, centre = _values(row, color, len(ids))
    mask = np.ones(len(ids), bool)
    if "response_mask" in row:
        mask = np.asarray(row["response_mask"])[0].astype(bool)
    scale = Scale.of(values[mask], centre)
    hover = {n: _token_column(row, n, len(ids)) for n in ON_HOVER if n in row and n != color}
    spans = [
        _span(text, mask[t], values[t], scale, _hover(t, ids[t], {color: values} | hover, mask[t]))
        for t, text in enumerate(_texts(row, ids, tokenizer)[:MAX_TOKENS])
    ]
    prompt = row["prompt"][0] if "prompt" in row else ""
    more = f"<p>and {len(ids) - MAX_TOKENS} more tokens</p>" if len(ids) > MAX_TOKENS else ""
    html = (
        '<div class="rlkit-tokens" style="font-size:13px;line-height:1.9">'
        f"<div><b>response {i}, uid {int(row['uid'][0])}: {escape(color)}</b> "
        f"{scale.legend()}{_key(mask, values)}</div>"
        '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">'
        f'<span class="prompt" style="{GREY}" title="prompt">{escape(prompt)}</span>'
        f"{''.join(spans)}</div>{more}</div>"
    )
    return TokenView(html, f"response {i}, {len(ids)} tokens, {color} {scale.words()}")


def _row(batch: Any, i: int) -> Any:
    """The row as a batch of one."""
    if not hasattr(batch, "select"):
        raise TypeError(f"batch: got {type(batch).__name__}, need an rk.Batch.")
    if isinstance(i, bool) or not isinstance(i, int | np.integer):
        raise TypeError(f"i: got {type(i).__name__}, need an int, the position of a row.")
    if not -len(batch) <= i < len(batch):
        raise IndexError(f"i: got {i}, need a position in this batch of {len(batch)} rows.")
    return batch.select([i])


def _values(row: Any, color: str, num_tokens: int) -> tuple[np.ndarray, float]:
    """Values [T] to colour by, and the value that is white."""
    if not isinstance(color, str):
        raise TypeError(f"color: got {type(color).__name__}, need the name of a column.")
    if color in row:
        return _token_column(row, color, num_tokens), 0.0
    derived = DERIVED.get(color)
    needed = (color,) if derived is None else derived.columns
    missing = [name for name in needed if name not in row]
    if derived is None or missing:
        raise KeyError(
            f"color: got {color!r}, and the batch has no column {', '.join(missing)}; it has "
            f"{sorted(row.columns)}. {'Bind it. ' if derived is None else derived.advice}Or colour "
            f"by another column of token values, or by one of {sorted(DERIVED)}."
        )
    first, second = (_token_column(row, name, num_tokens).astype(float) for name in needed)
    return derived.of(first, second), derived.centre


def _token_column(row: Any, name: str, num_tokens: int) -> np.ndarray:
    """A column's values [T] of the row."""
    values = row[name]
    if isinstance(values, list):
        raise TypeError(f"{name}: got text or objects, need a column of numbers, one a token.")
    values = values.detach().cpu()
    values = np.asarray(values.double() if values.is_floating_point() else values)
    if values.shape != (1, num_tokens):
        raise ValueError(
            f"{name}: got values of shape {list(values.shape)} for one row, need "
            f"[1, {num_tokens}], one a response token. "
            "Spread one value a response with batch.expand(values)."
        )
    return values[0]


def _texts(row: Any, ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Text of each token: the tokenizer's, or the characters of the response, or its id."""
    if tokenizer is not None:
        name = getattr(tokenizer, "token", lambda index: None)
        return [tokenizer.decode([int(k)]) or name(int(k)) or f"[{k}]" for k in ids]
    text = row["response"][0] if "response" in row else ""
    stopped = "finish_reason" in row and row["finish_reason"][0] == "stop"
    characters = [*text, "<stop>"] if stopped else list(text)
    pairs = set(zip(ids.tolist(), characters, strict=False))
    same = len(pairs) == len({k for k, _ in pairs}) == len({c for _, c in pairs})
    return characters if same and len(characters) == len(ids) else [f"[{k}]" for k in ids]


@dataclass(frozen=True, slots=True)
class Scale:
    """White at `centre`, blue at `high`, orange at `low`."""

    low: float
    centre: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray, centre: float) -> Scale:
        """The scale of the finite values: symmetric about the centre if they lie on both
        sides of it."""
        finite = values[np.isfinite(values)]
        if not len(finite):
            return cls(centre, centre, centre)
        if values.dtype.kind in "iu":
            return cls(float(finite.min()), float(finite.min()), float(finite.max()))
        reach = float(np.abs(finite - centre).max())
        below, above = finite.min() < centre, finite.max() > centre
        return cls(centre - reach * below, centre, centre + reach * above)

    def colour(self, value: float) -> str:
        """CSS colour of a finite value."""
        reach = (self.high if value >= self.centre else self.low) - self.centre
        share = min(max((value - self.centre) / reach, 0.0), 1.0) if reach else 0.0
        end = HIGH if value >= self.centre else LOW
        parts = [int(end[k : k + 2], 16) for k in (1, 3, 5)]
        return "#" + "".join(f"{round(255 + share * (part - 255)):02x}" for part in parts)

    def words(self) -> str:
        """The range as text."""
        return f"from {self.low:.3g} to {self.high:.3g}"

    def legend(self) -> str:
        """A bar of the colours with the numbers at its ends and, if signed, its middle."""
        stops = sorted({self.low, self.centre, self.high})
        bar = ",".join(self.colour(stop) for stop in (stops if len(stops) > 1 else stops * 2))
        numbers = " … ".join(f"{stop:.3g}" for stop in stops)
        return (
            f'<span class="legend" title="{escape(self.words())}" style="display:inline-block;'
            "width:90px;height:10px;border:1px solid #999;"
            f'background:linear-gradient(90deg,{bar})"></span> {numbers}'
        )


def _span(text: str, trainable: bool, value: Any, scale: Scale, title: str) -> str:
    """A token."""
    if not trainable:
        style, kind = MASKED, "masked"
    elif not np.isfinite(value):
        style, kind = f"color:#111;{NO_NUMBER}", "nan"
    else:
        style, kind = f"color:#111;background:{scale.colour(float(value))}", "token"
    shown = escape(VISIBLE.get(text, text))
    return f'<span class="{kind}" style="{style}" title="{escape(title)}">{shown}</span>'


def _hover(t: int, token_id: int, columns: dict[str, np.ndarray], trainable: bool) -> str:
    lines = [f"token {t}, id {token_id}"]
    lines += [f"{name} {values[t]:.5g}" for name, values in columns.items()]
    return "\n".join(lines if trainable else [*lines, "masked: not trained on"])


def _key(mask: np.ndarray, values: np.ndarray) -> str:
    """What the marks mean that are there."""
    keys: Sequence[tuple[bool, str, str]] = (
        (not mask.all(), MASKED, "masked"),
        (not np.isfinite(values[mask]).all(), f"color:#111;{NO_NUMBER}", "not finite"),
    )
    return "".join(
        f' · <span style="{style}">{name}</span>' for there, style, name in keys if there
    )
