"""Dynamic sampling: draw prompts until enough of their groups are worth a step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rlkit.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """What ``fill_groups`` drew."""

    batch: Batch
    """The groups of this step."""
    surplus: Batch | None
    """Groups that pass the filter, too, for the next step."""
    metrics: dict[str, float]
    """``sampling/...`` of the rounds."""


def fill_groups(
    sample: Callable[[int], Batch],
    keep: Callable[[Batch], bool],
    *,
    num_groups: int,
    column: str = "rewards",
    surplus: Batch | None = None,
    max_rounds: int = 10,
    allow_short: bool = False,
) -> Filled:
    """Exactly ``num_groups`` groups that pass ``keep``, drawn in rounds (DAPO, 2503.14476, 2025).

    ``sample(num)`` generates and scores a batch of new prompts, ``num`` groups being missing. It
    may return more: whole groups beyond the number needed are the next call's ``surplus``.
    ``keep(group)`` judges one group: let it read the accuracy, not a shaped reward, which gives
    spread to a group that is all wrong. ``column`` is the one whose mean is reported, over the
    values that are finite; NaN without a round.

    After ``max_rounds`` a RuntimeError says how many there are, or, with ``allow_short``, these are
    returned, if there are any.
    """
    if num_groups < 1 or max_rounds < 1:
        raise ValueError(
            f"fill_groups: got num_groups={num_groups}, max_rounds={max_rounds}; need at least 1 "
            "of each."
        )
    kept = [] if surplus is None else list(surplus.groups())
    num_carried, num_rounds, num_rows, num_drawn = len(kept), 0, 0, 0
    values = torch.zeros(0, dtype=torch.float64)  # of ``column``, where it is finite
    while len(kept) < num_groups and num_rounds < max_rounds:
        batch = sample(num_groups - len(kept))
        groups = list(batch.groups())
        kept += [group for group in groups if _keeps(keep, group)]
        num_rounds += 1
        num_rows += len(batch)
        num_drawn += len(groups)
        found = batch[column].double()
        values = torch.cat([values, found[found.isfinite()]])
    mean = float(values.mean()) if len(values) else math.nan
    if len(kept) < num_groups and not (allow_short and kept):
        advice = (
            "Near 0 take easier prompts, near 1 harder ones; or raise max_rounds, or pass "
            "allow_short=True for a smaller step."
        )
        if not len(values):
            advice = f"Let sample(num) return num groups, with numbers as {column}."
        raise RuntimeError(
            f"fill_groups: got {len(kept)} of the {num_groups} groups needed after {num_rounds} "
            f"rounds and {num_drawn} prompts (mean of {column} {mean:.3g}). {advice}"
        )
    num_kept = len(kept) - num_carried
    metrics = {
        "sampling/num_rounds": float(num_rounds),
        "sampling/num_responses": float(num_rows),
        "sampling/num_carried": float(num_carried),
        "sampling/kept_fraction": num_kept / num_drawn if num_drawn else math.nan,
        "sampling/accuracy": mean,
    }
    rest = kept[num_groups:]
    return Filled(
        batch=Batch.concat(kept[:num_groups]),
        surplus=Batch.concat(rest) if rest else None,
        metrics=metrics,
    )


def _keeps(keep: Callable[[Batch], bool], group: Batch) -> bool:
    """What the filter says of a group; errors name the group."""
    where = f"group {int(group['group_ids'][0])}"
    try:
        kept: Any = keep(group)
    except Exception as error:
        error.add_note(f"fill_groups: keep failed on {where}, of {len(group)} responses")
        raise
    if getattr(kept, "ndim", None) == 0:  # of NumPy or torch
        kept = kept.item()
    if not isinstance(kept, bool):
        shape = getattr(kept, "shape", None)
        got = repr(kept) if shape is None else f"{type(kept).__name__} of shape {tuple(shape)}"
        raise TypeError(
            f"keep: got {got} for {where}, need True or False, one for the whole group, such as "
            "bool(has_signal(group['rewards'], group['group_ids']).any())."
        )
    return kept
