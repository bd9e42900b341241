"""Tasks made of digits: reversal, addition, sorting, countdown."""

import ast
import operator
import random
import re

from rlkit.tasks.task import Task

BEHAVIOURS = (
    lambda digits: "".join(sorted(digits)),
    lambda digits: "".join(sorted(digits, reverse=True)),
    lambda digits: digits,
    lambda digits: digits[::-1],
)
"""What the warm-up text shows after a row of digits, equally often.

Ascending, descending, copy, reversal.
"""


def matches(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, to the character."""
    return float(response == answer)


def _digits(rng: random.Random, length: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(length))


def reverse_digits(*, length: int = 6, seed: int = 0) -> Task:
    """``483920>`` -> ``029384``. The shipped warm start reverses in about one response of five."""
    _check("length", length, 1, 40)

    def sample(rng: random.Random) -> tuple[str, str]:
        digits = _digits(rng, length)
        return digits + ">", digits[::-1]

    return Task(f"reverse_digits_{length}", sample, verify=matches, seed=seed)


def sort(*, length: int = 6, seed: int = 0) -> Task:
    """``483920>`` -> ``023489``."""
    _check("length", length, 1, 40)

    def sample(rng: random.Random) -> tuple[str, str]:
        digits = _digits(rng, length)
        return digits + ">", "".join(sorted(digits))

    return Task(f"sort_{length}", sample, verify=matches, seed=seed)


def add(*, digits: int = 2, seed: int = 0) -> Task:
    """``47+85=`` -> ``132``: two numbers of ``digits`` digits, zeros in front."""
    _check("digits", digits, 1, 15)

    def sample(rng: random.Random) -> tuple[str, str]:
        a, b = rng.randrange(10**digits), rng.randrange(10**digits)
        return f"{a:0{digits}d}+{b:0{digits}d}=", f"{a + b:0{digits + 1}d}"

    return Task(f"add_{digits}", sample, verify=matches, seed=seed)


def countdown(*, numbers: int = 3, seed: int = 0) -> Task:
    """``7 2 5=09>``: use each number once, with + - * and brackets, to reach the target.

    Many answers are right.
    """
    _check("numbers", numbers, 2, 4)

    def sample(rng: random.Random) -> tuple[str, str]:
        while True:
            given = [rng.randrange(1, 10) for _ in range(numbers)]
            used = given[:]
            rng.shuffle(used)
            text = str(used[0])
            for i, number in enumerate(used[1:]):
                text = f"({text})" if i else text
                text += f"{rng.choice('+-*')}{number}"
            value = evaluate_arithmetic(text)
            if value is not None and 0 <= value <= 99:
                return f"{' '.join(map(str, given))}={value:02d}>", text

    return Task(f"countdown_{numbers}", sample, verify=reaches_target, seed=seed)


def reaches_target(prompt: str, response: str, answer: str) -> float:
    """1 if the response uses exactly the prompt's numbers and its value is the target."""
    numbers, target = prompt.rstrip(">").split("=")
    used = re.findall(r"\d+", response)
    right = sorted(used) == sorted(numbers.split()) and evaluate_arithmetic(response) == int(target)
    return float(right)


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate_arithmetic(text: str) -> int | None:
    """Value of an expression of integers, + - * and brackets.

    None for anything else. Nothing is executed.
    """
    if len(text) > 64 or not re.fullmatch(r"[\d+\-*() ]+", text) or "**" in text:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

    def value(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left), value(node.right)
            return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)
        return None

    return value(tree)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name}: got {value!r}, need an integer from {low} to {high}.")
