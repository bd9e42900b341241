"""Rewards of a batch, and accuracy on held-out prompts."""

from collections.abc import Callable
from typing import Any

import torch

from rlkit import trace
from rlkit.batch import Batch
from rlkit.store import Column


def score(reward_fn: Callable[[str, str, str], float], batch: Batch) -> Column:
    """``reward_fn(prompt, response, answer) -> float`` of each row, run where the rows lie: a
    column [B] float32.

    An exception of the function is raised with a note of the row it failed on. NaN is allowed: it
    takes its row out of the group.
    """

    def rewards(prompts: list[str], responses: list[str], answers: list[str]) -> torch.Tensor:
        return judge(reward_fn, prompts, responses, answers)

    rewards.__name__ = "score"
    return batch.apply(rewards, "prompt", "response", "answer")


def judge(
    reward_fn: Callable[[str, str, str], float],
    prompts: list[str],
    responses: list[str],
    answers: list[str],
) -> torch.Tensor:
    """Rewards [B] float32 of B rows of text, one call a row."""
    values = []
    for i, row in enumerate(zip(prompts, responses, answers, strict=True)):
        try:
            value: Any = reward_fn(*row)
        except Exception as error:
            prompt, response, answer = row
            error.add_note(
                f"reward function failed on row {i}: prompt={prompt!r}, response={response!r}, "
                f"answer={answer!r}"
            )
            raise
        if getattr(value, "ndim", None) == 0:  # of NumPy or torch
            value = value.item()
        if not isinstance(value, bool | int | float):
            raise TypeError(
                f"reward function: got {type(value).__name__} on row {i}, need a float, one "
                "number a response."
            )
        values.append(float(value))
    return torch.tensor(values, dtype=torch.float32)


def evaluate(
    rollout: Any,
    prompts: Batch,
    verify: Callable[[str, str, str], float],
    *,
    n: int = 1,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
) -> dict[str, float]:
    """Mean of ``verify`` over ``n`` responses to each held-out prompt, as ``eval/accuracy``.

    Greedy by default. Each call draws the same samples of a prompt (common random numbers), so two
    calls differ by the policy alone, and there may be any number of them.
    """
    prompts = prompts.fresh()
    with trace.labelled("evaluate"):
        more = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
        batch = rollout.generate(prompts, n=n, temperature=temperature, **more)
        values = score(verify, batch).load().tensor
    return {"eval/accuracy": float(values.mean())}
