"""Simulated groups of responses, as a schedule sees a batch: ids, versions, and no tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class Group:
    """A prompt and its responses on their way."""

    number: int
    first_version: int = 0
    """Of the weights when it began."""
    last_version: int = 0
    """Of the weights when it was finished."""
    unfinished: int = 0
    """Responses that are not."""
    tokens: float = 0.0
    """Prompts and finished responses."""
    squares: float = 0.0
    """Sum of squared lengths."""
    ready_s: float = 0.0
    """When the trainer may have it."""


class Groups:
    """Groups, a row each; what schedules ask of an ``rk.Batch``."""

    def __init__(self, rows: Sequence[Group]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def meta(self) -> dict[str, np.ndarray]:
        """``group_ids`` [B] and ``policy_version`` [B], the oldest of a group."""
        return {
            "group_ids": np.array([group.number for group in self.rows]),
            "policy_version": np.array([group.first_version for group in self.rows]),
        }

    def groups(self) -> Iterator["Groups"]:
        """One each."""
        return (Groups([group]) for group in self.rows)

    def select(self, rows: Sequence[int]) -> "Groups":
        """Some of the rows."""
        return Groups([self.rows[row] for row in rows])

    @staticmethod
    def concat(parts: Sequence["Groups"]) -> "Groups":
        """All rows of the parts."""
        return Groups([group for part in parts for group in part.rows])

    def apply(self, fn: Callable[..., list[Any]], *names: str) -> "Values":
        """``fn`` of ``token_version`` and ``response_mask``; first and last token stand for all."""
        columns = {
            "token_version": [np.array([g.first_version, g.last_version]) for g in self.rows],
            "response_mask": [np.ones(2) for _ in self.rows],
        }
        return Values(fn(*(columns[name] for name in names)))


@dataclass(frozen=True, slots=True)
class Values:
    """A column of what ``Groups.apply`` found."""

    values: list[Any]

    def load(self) -> "Values":
        """Itself: the values are here."""
        return self
