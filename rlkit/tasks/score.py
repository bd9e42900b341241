"""Rewards of a batch, and accuracy on held-out prompts."""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlkit import trace
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.checks import fits, whole
from rlkit.functions import source_of, unwrapped
from rlkit.rewards import Combined
from rlkit.rewards.combine import weighted_sum
from rlkit.rewards.verdict import as_reward, outcome_of

logger = logging.getLogger("rlkit.tasks")


def score(reward_fn: Callable[[str, str, str], float], batch: Batch) -> Column:
    """``reward_fn(prompt, response, answer) -> float`` of each row, run where the rows lie: a
    column [B] float32.

    An exception of the function is raised with a note of the row it failed on. NaN is allowed: it
    takes its row out of the group. A reward of ``rk.rewards.combine`` also writes the columns
    ``reward/<name>`` [B] of its parts, and ``outcomes`` [B]; those of a score before this one go,
    for a reward without parts when its column is bound as ``rewards``.
    """
    old = [name for name in batch.columns if name.startswith("reward/") or name == "outcomes"]
    if isinstance(reward_fn, Combined):
        scored = _score_parts(reward_fn, batch)
        for name in set(old) - {f"reward/{part}" for part in reward_fn.weights} - {"outcomes"}:
            del batch[name]
        return scored
    if isinstance(unwrapped(reward_fn), Combined):
        raise TypeError(
            f"score: got {reward_fn!r}, whose parts would be lost, need the reward of combine(...) "
            "itself. Bind arguments in its parts: combine({name: (partial(fn, ...), weight)})."
        )

    _check_reward(reward_fn)

    def rewards(prompts: list[str], responses: list[str], answers: list[str]) -> torch.Tensor:
        return judge(reward_fn, prompts, responses, answers)

    rewards.__name__ = "score"
    rewards.what = f"score({source_of(reward_fn).name})"  # pyright: ignore
    scored = batch.apply(rewards, "prompt", "response", "answer")
    scored.outdated = old
    return scored


def _score_parts(combined: Combined, batch: Batch) -> Column:
    """Judge once, then cut the rows of rewards [B][K] into columns, all beside the data."""
    weights = list(combined.weights.values())
    judged = functools.partial(
        _judge_parts, *combined.functions.values(), names=tuple(combined.weights)
    )
    judged.__name__ = "score"  # pyright: ignore[reportAttributeAccessIssue]
    judged.what = f"score({combined!r})"  # pyright: ignore[reportAttributeAccessIssue]
    scored = batch.select(range(len(batch)))
    scored["parts"] = scored.apply(judged, "prompt", "response", "answer")
    for k, name in enumerate(combined.weights):

        def part(rows: list[list[float]], k: int = k) -> torch.Tensor:
            return torch.tensor([row[k] for row in rows], dtype=torch.float32)

        batch[f"reward/{name}"] = scored.apply(part, "parts")

    def total(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([weighted_sum(row, weights) for row in rows], dtype=torch.float32)

    def outcomes(rows: list[list[float]]) -> list[str]:
        return [weighted_sum(row, weights).outcome for row in rows]

    batch["outcomes"] = scored.apply(outcomes, "parts")
    return scored.apply(total, "parts")


def _judge_parts(*arguments: Any, names: Sequence[str]) -> list[list[float]]:
    """Rewards [B][K] of K functions, followed by B prompts, B responses and B answers."""
    *functions, prompts, responses, answers = arguments
    parts = [
        _judgements(fn, prompts, responses, answers, of=f" of part {name!r}")
        for fn, name in zip(functions, names, strict=True)
    ]
    return [list(row) for row in zip(*parts, strict=True)]


def judge(
    reward_fn: Callable[[str, str, str], float],
    prompts: list[str],
    responses: list[str],
    answers: list[str],
) -> torch.Tensor:
    """Rewards [B] float32 of B rows of text, one call a row."""
    values = _judgements(reward_fn, prompts, responses, answers)
    return torch.tensor(values, dtype=torch.float32)


def _judgements(
    reward_fn: Callable[[str, str, str], float],
    prompts: list[str],
    responses: list[str],
    answers: list[str],
    *,
    of: str = "",
) -> list[float]:
    values: list[float] = []
    for i, row in enumerate(zip(prompts, responses, answers, strict=True)):
        try:
            value = as_reward(reward_fn(*row), f"{of} on row {i}")
        except Exception as error:
            prompt, response, answer = row
            error.add_note(
                f"reward function{of} failed on row {i}: prompt={prompt!r}, response={response!r}, "
                f"answer={answer!r}"
            )
            raise
        values.append(value)
    failed = Counter(outcome for outcome in map(outcome_of, values) if outcome != "ok")
    for outcome, count in failed.items():
        logger.warning("score: %d of %d responses ended in %s", count, len(values), outcome)
    return values


def evaluate(
    rollout: Any,
    prompts: Batch,
    verify: Callable[[str, str, str], float],
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
    k: int | None = None,
) -> dict[str, float]:
    """Mean of ``verify`` over ``n`` responses to each held-out prompt, as ``eval/accuracy`` (which
    others call mean@n); with ``k`` also ``eval/pass_at_k``, see ``pass_at_k``.

    Verdicts that are not finite are in no mean; ``eval/num_failed`` counts them.
    Greedy by default. Each call draws the same samples of a prompt (common random numbers), so two
    calls differ by the policy alone, and there may be any number of them.
    """
    if k is not None:
        _check_k(k, n)
    _check_reward(verify)
    prompts = prompts.fresh()
    with trace.labelled("evaluate"):
        more = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        batch = rollout.generate(prompts, n=n, temperature=temperature, **more)
        values = score(verify, batch).load().tensor
    valid = values[values.isfinite()]
    accuracy = float(valid.mean()) if len(valid) else math.nan
    found = {"eval/accuracy": accuracy, "eval/num_failed": len(values) - len(valid)}
    if k is not None:
        found["eval/pass_at_k"] = pass_at_k(values.view(-1, n), k)
    return found


def pass_at_k(verdicts: torch.Tensor, k: int) -> float:
    """Probability that one of ``k`` responses is right, a verdict of at least 1; mean over prompts.

    verdicts [P, n], n >= k. Without bias from n samples, c of them right: 1 − C(n−c, k) / C(n, k)
    (Chen et al., 2107.03374, 2021). Verdicts that are not finite don't count among the n; prompts
    with fewer than k left are in no mean. NaN without prompts.
    """
    _check_k(k, verdicts.shape[1])
    chances = []
    for row in verdicts:
        row = row[row.isfinite()]
        num, wrong = len(row), int((row < 1).sum())
        if num >= k:
            chances.append(1 - math.comb(wrong, k) / math.comb(num, k))
    return sum(chances) / len(chances) if chances else math.nan


def _check_k(k: int, n: int) -> None:
    if not 1 <= whole("k", k) <= n:
        raise ValueError(f"pass@k: got k={k} of n={n} responses, need 1 to n: raise n or lower k.")


def _check_reward(fn: Any) -> None:
    fits("reward function", fn, "prompt", "response", "answer")
