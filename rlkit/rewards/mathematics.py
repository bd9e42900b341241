"""Rewards by symbolic mathematics: the math-verify package in a process that can be killed."""

import logging

from rlkit.rewards.killable import Killable


def equal(prompt: str, response: str, answer: str) -> float:
    """1 if the last expression of the response means what the answer means; else 0.

    By math-verify, without its own limits on time: they stand on SIGALRM, which works on the main
    thread only, and elsewhere it says that nothing matched.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its limits are off
    marked = answer if "$" in answer or "\\" not in answer else f"${answer}$"
    gold = parse(marked, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if not gold:
        raise ValueError(
            f"answer: got {answer[:80]!r}, need a number or an expression that math-verify reads, "
            "LaTeX between dollar signs. Use exact_match for other answers."
        )
    found = parse(response, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return float(verify(gold, found, timeout_seconds=None))


# sympy loads its parts when they are first needed, up to 0.3 s each: before the first response.
_WARM_UP = ("", r"$\frac{1}{2}(x+1)^2$", r"$\frac{x^2+2x+1}{2}$")
math_verify = Killable(equal, timeout_s=2.0, memory_gib=2.0, warm_up=_WARM_UP)
"""``equal`` from any thread: a hang ends after 2 s as ``Verdict(nan, "timeout")``."""
