"""A generated task: an endless, seeded, resumable stream of prompts with a held-out split and a
verifier.
"""

import hashlib
import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from rlkit.batch import Batch
from rlkit.batch.columns import check_group_ids, int_array
from rlkit.checks import whole
from rlkit.models.tokenizer import Tokenizer, char_tokenizer

HELD_OUT = 10  # one prompt in ten, by a hash of its text, is never trained on
POSITION_BITS, TASK_BITS = 32, 13
HELD_OUT_GROUPS = 1 << (POSITION_BITS + TASK_BITS)  # group ids of held-out prompts start here

_ranges: dict[int, str] = {}  # of group ids of this process -> the task whose they are

Sample = Callable[[random.Random], tuple[str, str]]
"""rng -> (prompt, answer)."""


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is never trained on, by a hash of its text."""
    return zlib.crc32(prompt.encode()) % HELD_OUT == 0


class Task:
    """Prompts drawn by ``sample``; item ``i`` of a split depends on the seed and ``i`` alone."""

    def __init__(
        self,
        name: str,
        sample: Sample,
        *,
        verify: Callable[[str, str, str], float],
        seed: int = 0,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.name, self.sample, self.verify, self.seed = name, sample, verify, seed
        self.tokenizer = tokenizer or char_tokenizer()
        self._range: int | None = None

    def item(self, index: int, *, held_out: bool = False) -> tuple[str, str]:
        """(prompt, answer) number ``index`` of a split."""
        rng = random.Random(f"{self.name}/{self.seed}/{held_out}/{index}")
        for _ in range(10_000):
            prompt, answer = self.sample(rng)
            if is_held_out(prompt) == held_out:
                return prompt, answer
        raise ValueError(
            f"{self.name}: found no {'held-out' if held_out else 'training'} prompt in 10,000 "
            "draws; the task has too "
            "few different prompts to split. Make it longer."
        )

    def batches(self, *, size: int, steps: int, start: int = 0) -> Iterator[Batch]:
        """``steps`` batches of ``size`` training prompts, from batch number ``start`` of the stream
        on.
        """
        size, steps = whole("size", size, what="prompt"), whole("steps", steps, least=0)
        start = whole("start", start, least=0)
        return (
            self._batch(range(step * size, (step + 1) * size), held_out=False)
            for step in range(start, start + steps)
        )

    def stream(self, *, size: int, position: int = 0) -> "PromptStream":
        """Batches of ``size`` training prompts without end, from prompt number ``position`` on."""
        return PromptStream(self, size=size, position=position)

    def identity(self) -> dict[str, Any]:
        """What tells this task's prompts from another's."""
        prompt, answer = self.item(0)
        return {"name": self.name, "seed": self.seed, "first": f"{prompt}{answer}"}

    def held_out(self, num: int) -> Batch:
        """The first ``num`` held-out prompts as one batch."""
        return self._batch(range(whole("held_out", num, what="prompt")), held_out=True)

    def _batch(self, indices: range, *, held_out: bool) -> Batch:
        if indices.stop > 1 << POSITION_BITS:
            raise ValueError(
                f"{self.name}: got prompt number {indices.stop - 1}, need less than "
                f"2^{POSITION_BITS}: a group id has {POSITION_BITS} bits of it."
            )
        items = [self.item(i, held_out=held_out) for i in indices]
        first = self.first_group_id(held_out=held_out)
        return prompt_batch(items, tokenizer=self.tokenizer, group_ids=[first + i for i in indices])

    def first_group_id(self, *, held_out: bool = False) -> int:
        """Group id of prompt 0 of a split.

        From the low end: 32 bits are the prompt's number, 13 say which task, one says held out. The
        13 are a hash of ``identity()``, so they are the same in every process and whatever other
        tasks there are; should two tasks of a process share it, the later takes the next free one.
        """
        if self._range is None:
            self._range = _range_of(json.dumps(self.identity(), sort_keys=True))
        return (self._range << POSITION_BITS) + (HELD_OUT_GROUPS if held_out else 0)

    def __repr__(self) -> str:
        prompt, answer = self.item(0)
        return f"Task({self.name!r}, first prompt {prompt!r} -> {answer!r})"


def _range_of(identity: str) -> int:
    """The range of group ids of a task."""
    wanted = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:4], "big")
    for i in range(1 << TASK_BITS):
        number = (wanted + i) % (1 << TASK_BITS)
        if _ranges.setdefault(number, identity) == identity:
            return number
    raise ValueError(
        f"task: got more than {1 << TASK_BITS} different tasks in one process, need at most as "
        "many, so that no two share group ids. Start a new process."
    )


class PromptStream:
    """Batches of ``size`` training prompts without end.

    ``position`` counts the prompts handed out. It is all that a resume needs: the prompt at a
    position depends on the task alone, shuffles and epochs included. Group ids
    follow from it, and differ between tasks, so no two prompts of a run share one.
    """

    def __init__(self, task: Task, *, size: int, position: int = 0) -> None:
        self.task, self.size = task, whole("size", size, what="prompt")
        self.position = whole("position", position, least=0)

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Batch:
        start, self.position = self.position, self.position + self.size
        return self.task._batch(range(start, self.position), held_out=False)

    def save_state(self) -> dict[str, Any]:
        """Position and identity of the task, as plain values."""
        return {"task": self.task.identity(), "position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position; ValueError if it is one of another task."""
        self.check_state(state)
        self.position = state["position"]

    def check_state(self, state: Mapping[str, Any]) -> None:
        """ValueError if a saved position is one of another task's prompts."""
        if state["task"] != self.task.identity():
            raise ValueError(
                f"prompts: got a position in {state['task']}, this task is "
                f"{self.task.identity()}; need the task, with the seed, that it was saved with."
            )

    def __repr__(self) -> str:
        return f"PromptStream({self.task.name!r}, size={self.size}, position={self.position})"


def prompt_batch(
    items: list[tuple[str, str]], *, tokenizer: Tokenizer, group_ids: list[int]
) -> Batch:
    """Columns prompt, answer, prompt_ids of (prompt, answer) pairs; one group a prompt.

    Group ids are yours: from 0 to 2^47 - 1, each once in the life of a run. Those
    of tasks are below 2^46 (``Task.first_group_id``).
    """
    check_group_ids(int_array("group_ids", group_ids))
    ids = [torch.tensor(tokenizer.encode(prompt)) for prompt, _ in items]
    return Batch.from_columns(
        {
            "uid": group_ids,
            "group_ids": group_ids,
            "prompt": [prompt for prompt, _ in items],
            "answer": [answer for _, answer in items],
            "prompt_ids": ids,
        }
    )
