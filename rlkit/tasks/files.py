"""Tasks over prompts from files: JSON lines, and GSM8K's."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlkit.algo.rewards import number_match
from rlkit.models.tokenizer import Tokenizer
from rlkit.tasks.listed import from_list, split_tenth
from rlkit.tasks.task import Task

Folder = str | os.PathLike[str]
Verify = Callable[[str, str, str], float]
ReadRow = Callable[[Mapping[str, Any]], tuple[str, str]]
"""An object of a line -> (prompt, answer); ValueError says what is wrong with it."""

MOST_NAMED = 3  # bad lines that an error names


def from_jsonl(
    path: Folder,
    *,
    verify: Verify,
    held_out: Folder | None = None,
    prompt: str = "prompt",
    answer: str = "answer",
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Task:
    """A task over a file with a JSON object a line; blank lines are passed over.

    ``prompt`` and ``answer`` name the columns: a text, and a text or a number. Others are not read.
    ``held_out``: a second file of prompts that are never trained on; without one it is every tenth
    prompt, by a hash of its text. Epochs are shuffled by ``seed`` and go on where a stream
    stopped. ValueError names the lines that are no such rows.
    """
    read = _columns(prompt, answer)
    return _task(path, held_out, read, verify=verify, seed=seed, tokenizer=tokenizer)


def from_gsm8k(
    path: Folder,
    *,
    held_out: Folder | None = None,
    template: str = "Question: {question}\nAnswer:",
    verify: Verify = number_match,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Task:
    """A task over a file in GSM8K's format (2110.14168, 2021): ``question`` and ``answer``, whose
    last line is ``#### `` and the number.

    The prompt is ``template`` with the question in it, the answer the number without commas.
    Other arguments as of ``from_jsonl``.
    """
    if "{question}" not in template:
        raise ValueError(f"template: got {template!r}, need a text with {{question}} in it.")
    columns = _columns("question", "answer")

    def read(row: Mapping[str, Any]) -> tuple[str, str]:
        question, worked = columns(row)
        number = worked.rpartition("####")[2].strip().replace(",", "") if "####" in worked else ""
        if not number:
            raise ValueError(f"answer {worked[-40:]!r} has no '#### number' at its end")
        return template.replace("{question}", question), number

    return _task(path, held_out, read, verify=verify, seed=seed, tokenizer=tokenizer)


def _columns(prompt: str, answer: str) -> ReadRow:
    """Two columns of a row as text."""

    def read(row: Mapping[str, Any]) -> tuple[str, str]:
        for name in (prompt, answer):
            if name not in row:
                raise ValueError(f"no column {name!r} among {', '.join(map(repr, row))}")
        asked, right = row[prompt], row[answer]
        if not isinstance(asked, str) or not asked:
            raise ValueError(f"{prompt} is {asked!r}, need a text")
        number = isinstance(right, int) or (isinstance(right, float) and math.isfinite(right))
        if isinstance(right, bool) or not (isinstance(right, str) or number):
            raise ValueError(f"{answer} is {right!r}, need a text or a number")
        return asked, str(right)

    return read


def _task(
    path: Folder,
    held_out: Folder | None,
    read: ReadRow,
    *,
    verify: Verify,
    seed: int,
    tokenizer: Tokenizer | None,
) -> Task:
    pairs = read_pairs(path, read)
    if held_out is not None:
        training, other = pairs, read_pairs(held_out, read)
    else:
        training, other = split_tenth(pairs)
    if not training:
        raise ValueError(
            f"{path}: got {len(pairs)} prompts, all of them held out by their hash; need more, or "
            "a file of its own as held_out."
        )
    name = Path(path).stem
    return from_list(
        training, held_out=other, verify=verify, name=name, seed=seed, tokenizer=tokenizer
    )


def read_pairs(path: Folder, read: ReadRow) -> list[tuple[str, str]]:
    """(prompt, answer) of every line; ValueError names the first bad ones and counts them."""
    pairs, bad = [], []
    with open(path, "rb") as lines:  # bytes: text that is no UTF-8 has a line, too
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"is {type(row).__name__}, need an object")
                pair = read(row)
                "".join(pair).encode()  # half a surrogate pair, "\ud83d", is no text
                pairs.append(pair)
            except ValueError as error:
                bad.append(f"line {number}: {error}")
    if bad:
        more = f" and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
        raise ValueError(
            f"{path}: got {len(bad)} bad lines of {len(bad) + len(pairs)}: "
            f"{'; '.join(bad[:MOST_NAMED])}{more}. Need a JSON object a line; mend or remove them."
        )
    if not pairs:
        raise ValueError(f"{path}: got no rows, need at least one JSON object on a line.")
    return pairs
