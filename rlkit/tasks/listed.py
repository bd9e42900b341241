"""A task over a list of prompts, shuffled anew in each epoch."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.models.tokenizer import Tokenizer
from rlkit.tasks.task import Task, is_held_out

Pairs = Sequence[tuple[str, str]]
"""(prompt, answer) each."""


class ListedTask(Task):
    """Training prompt ``i`` is place ``i % N`` of epoch ``i // N``: shuffle and epoch follow from
    the position alone, and a batch may reach over the end of an epoch.
    """

    def __init__(
        self,
        name: str,
        training: Pairs,
        *,
        held_out: Pairs,
        verify: Callable[[str, str, str], float],
        seed: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        super().__init__(name, lambda rng: ("", ""), verify=verify, seed=seed, tokenizer=tokenizer)
        self.training, self.other = list(training), list(held_out)
        text = json.dumps(self.training).encode()
        self._sha256 = hashlib.sha256(text).hexdigest()
        self._order: tuple[int, list[int]] = (-1, [])  # of the epoch asked for last

    def item(self, index: int, *, held_out: bool = False) -> tuple[str, str]:
        """(prompt, answer) number ``index``; held-out ones come once, in their order."""
        if held_out:
            if index >= len(self.other):
                raise ValueError(
                    f"{self.name}: got more than the {len(self.other)} prompts that are held out, "
                    f"need at most these. Ask for fewer (eval_prompts= of a recipe's config), or "
                    "make the task with more of them."
                )
            return self.other[index]
        epoch, place = divmod(index, len(self.training))
        if self._order[0] != epoch:
            order = list(range(len(self.training)))
            random.Random(f"{self.name}/{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.training[self._order[1][place]]

    def identity(self) -> dict[str, Any]:
        """Name, seed and a hash of the prompts."""
        return {"name": self.name, "seed": self.seed, "sha256": self._sha256}


def from_list(
    training: Pairs,
    *,
    verify: Callable[[str, str, str], float],
    held_out: Pairs = (),
    name: str = "list",
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Task:
    """A task over (prompt, answer) pairs: epochs without end, each shuffled by ``seed``.

    ``held_out`` pairs are never trained on. ``verify(prompt, response, answer) -> float`` judges.
    """
    pairs = [*training, *held_out]
    odd = [pair for pair in pairs if len(pair) != 2 or not all(isinstance(x, str) for x in pair)]
    if not training or odd:
        got = f"{odd[0]!r}" if odd else "no pairs"
        raise ValueError(f"from_list: got {got}, need at least one (prompt, answer) of two texts.")
    return ListedTask(
        name, training, held_out=held_out, verify=verify, seed=seed, tokenizer=tokenizer
    )


def split_tenth(pairs: Pairs) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(training, held out): every tenth prompt by a hash of its text, so equal prompts stay
    together.
    """
    training, held_out = [], []
    for pair in pairs:
        (held_out if is_held_out(pair[0]) else training).append(pair)
    return training, held_out
