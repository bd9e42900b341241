"""Several rewards as one: their weighted sum, each part kept and logged apart."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

from rlkit.rewards.verdict import Verdict, as_reward, outcome_of
from rlkit.types import RewardFn

if TYPE_CHECKING:
    from rlkit.batch import Batch

COUNTS = {"reward/num_timeouts": "timeout", "reward/num_errors": "error"}


class Combined:
    """A reward function: the sum of weight times reward over its named parts."""

    def __init__(self, parts: Mapping[str, tuple[RewardFn, float]]) -> None:
        self.functions = {name: fn for name, (fn, _) in parts.items()}
        self.weights = {name: float(weight) for name, (_, weight) in parts.items()}

    def __call__(self, prompt: str, response: str, answer: str) -> Verdict:
        """The weighted sum for one response."""
        rewards = [as_reward(fn(prompt, response, answer)) for fn in self.functions.values()]
        return weighted_sum(rewards, list(self.weights.values()))

    def __repr__(self) -> str:
        return f"Combined({' + '.join(f'{w:g} {name}' for name, w in self.weights.items())})"


def weighted_sum(rewards: Sequence[float], weights: Sequence[float]) -> Verdict:
    """Sum of weight times reward, NaN where it is not finite, and how it came about.

    The outcome is that of the first part that failed, or error for a sum that is not finite. A part
    of weight 0 is in neither.
    """
    parts = [(w, r) for r, w in zip(rewards, weights, strict=True) if w]
    try:
        total = math.fsum(w * r for w, r in parts)
    except (OverflowError, ValueError):  # 1e308 twice; inf and -inf
        total = math.inf
    outcomes = [outcome_of(r) for _, r in parts] + ["ok" if math.isfinite(total) else "error"]
    failed = next((outcome for outcome in outcomes if outcome != "ok"), "ok")
    return Verdict(total if math.isfinite(total) else math.nan, failed)


def combine(parts: Mapping[str, tuple[RewardFn, float]]) -> Combined:
    """``{name: (reward_fn, weight)}`` as one reward function.

    ``batch["rewards"] = rk.score(combine(...), batch)`` also writes each part, unweighted, into the
    column ``reward/<name>``, and ok, timeout or error into ``outcomes``; ``reward_metrics(batch)``
    has the means and counts. A part of weight 0 is judged and logged, and is neither in the sum nor
    in ``outcomes``. A sum that is not finite is NaN, and an error.
    """
    if not isinstance(parts, Mapping):
        raise TypeError(f"combine: got {parts!r}, need a dict, {{name: (reward_fn, weight)}}.")
    for name, part in parts.items():
        pair = isinstance(part, tuple) and len(part) == 2
        if not (pair and callable(part[0]) and _is_finite(part[1])):
            raise TypeError(
                f"{name}: got {part!r}, need (reward_fn, weight): a function of prompt, response "
                "and answer, and a finite number."
            )
    if not any(weight for _, weight in parts.values()):
        raise ValueError(f"combine: got {dict(parts)}, need a part with a weight other than 0.")
    return Combined(parts)


def _is_finite(weight: object) -> bool:
    return isinstance(weight, Real) and math.isfinite(weight)


def reward_metrics(batch: "Batch") -> dict[str, float]:
    """Means of ``rewards`` and of its parts, and how many judgements failed, for ``log.add``.

    NaN rewards are in no mean; ``group/num_failed_rewards`` counts them.
    """
    means = {"reward": "rewards"}
    for name in batch.columns:
        if name.startswith("reward/"):
            means[f"{name}_mean"] = name
    found = {}
    for metric, column in means.items():
        values = batch[column].double()  # [B]
        valid = values[values.isfinite()]
        found[metric] = float(valid.mean()) if len(valid) else math.nan
    found["group/num_failed_rewards"] = int((~batch["rewards"].isfinite()).sum())
    if "outcomes" in batch:
        outcomes = batch["outcomes"]
        found |= {metric: outcomes.count(outcome) for metric, outcome in COUNTS.items()}
    return found
