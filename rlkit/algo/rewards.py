r"""Rewards: ``(prompt, response, answer) -> float``, and the penalty on length.

Text is compared, never evaluated, in time linear in its length: a response may hold anything.
"""

import re
from fractions import Fraction

from jaxtyping import Float, Shaped
from torch import Tensor

_NUMBER = re.compile(
    r"(?<![0-9A-Za-z_])(?<![0-9]\.)[-+−]?"  # a "-" after a digit or a letter is no sign
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)?"
)
_MAX_CHARACTERS = 100  # of a number: longer is no answer, and 1e999999999 would fill the memory
_FRACTION = re.compile(  # not after a digit: 2\frac{1}{2} is a mixed number
    r"(?:(?<![0-9A-Za-z_])([-+−]))?(?<![0-9])\\[dt]?frac\{([-+]?[0-9]+)\}\{([0-9]+)\}"
)
_SLASH = r" \1\2/\3"
_PERCENT = re.compile(r"\s?(?:\\?%|percent\b)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")
_SPACING = re.compile(r"\\[!,;: ]|\\left(?![a-z])|\\right(?![a-z])|\s|\\?[$%]")
_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # anything but one of the four tags
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""The template of DeepSeek-R1-Zero (2501.12948, 2025): each tag once, in this order, any space
between and around them."""


def exact_match(prompt: str, response: str, answer: str) -> float:
    """1 if the response is the answer, spaces around either aside; else 0."""
    return float(response.strip() == answer.strip())


def number_match(prompt: str, response: str, answer: str, *, tolerance: float = 0.0) -> float:
    r"""1 if the last number of the response equals the last number of the answer; else 0.

    Exact by default, so 0.5 is 1/2 but 0.33 is not 1/3; ``tolerance`` is the largest difference
    allowed, relative to the answer where that is above 1. Reads -3, 1,234.50, 2.5e3, 3/4 and
    \frac{3}{4}; currency and units are passed over. 50% is 50%, 50 and 0.5.
    """
    if not 0 <= tolerance < 1:
        raise ValueError(
            f"tolerance: got {tolerance}, need 0 <= tolerance < 1, such as 1e-3 for a thousandth."
        )
    right = _last_number(answer)
    if right is None:
        raise ValueError(
            f"answer: got {answer[:80]!r}, need text with a number in it. "
            "Use exact_match or boxed_match for other answers."
        )
    found = _last_number(response)
    if found is None:
        return 0.0
    (value, percent), (need, percent_needed) = found, right
    readings = [value]
    if percent != percent_needed:
        readings.append(value / 100 if percent else value * 100)
    allowed = Fraction(tolerance) * max(1, abs(need))
    return float(any(abs(each - need) <= allowed for each in readings))


def boxed_match(prompt: str, response: str, answer: str) -> float:
    r"""1 if the last \boxed{...} of the response equals the answer, as a number or as text; else 0.

    Text is compared without spaces, dollar and percent signs and \text{}. A box never closed does
    not count.
    """
    boxed = last_boxed(response)
    if boxed is None:
        return 0.0
    got, need = _plain(boxed), _plain(answer)
    number = _number(got)
    return float(got == need or (number is not None and number == _number(need)))


def format_reward(prompt: str, response: str, answer: str, *, pattern: str = THINK_ANSWER) -> float:
    """1 if all of the response matches the regular expression; else 0. The answer is not judged.

    ``.`` matches line ends, too. Python's engine may take exponential time on nested repetition,
    such as ``(a+)+b``: run such a pattern in an ``rk.rewards.Killable``.
    """
    return float(re.fullmatch(pattern, response, flags=re.DOTALL) is not None)


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...}, inner braces balanced; None if it is never closed."""
    start = text.rfind(r"\boxed")
    inside = text[start + len(r"\boxed") :].lstrip() if start >= 0 else ""
    if not inside.startswith("{"):
        return None
    depth = 0
    for i, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[1:i]
    return None


def overlong_penalty(
    response_mask: Shaped[Tensor, "B T"], *, soft: int, hard: int
) -> Float[Tensor, " B"]:
    """0 up to soft tokens, a straight line to −1 at hard tokens, −1 beyond; to add to rewards.

    DAPO (2503.14476, 2025, equation 13), with L_max = hard and L_cache = hard − soft.
    response_mask [B, T] -> [B]; a response is as long as its mask has ones.
    """
    if not 0 <= soft < hard:
        raise ValueError(
            f"overlong_penalty: got soft={soft}, hard={hard}; need 0 <= soft < hard, lengths in "
            "tokens: the penalty begins after soft and is full from hard on."
        )
    lengths = response_mask.bool().sum(1)  # [B]
    return ((soft - lengths) / (hard - soft)).clamp(-1.0, 0.0)


def _plain(text: str) -> str:
    """LaTeX that means the same, written the same."""
    text = _TEXT.sub(r"\1", text).replace("{,}", ",")
    text = re.sub(r"\\[dt]frac", r"\\frac", _SPACING.sub("", text))
    return text.removesuffix(".")


def _number(text: str) -> Fraction | None:
    """The number that a text is, or None."""
    match = _NUMBER.fullmatch(_FRACTION.sub(_SLASH, text).strip())
    return None if match is None else _fraction(match.group())


def _last_number(text: str) -> tuple[Fraction, bool] | None:
    """The last number in a text, and whether a percent sign follows; or None."""
    text = text.replace("{,}", ",").replace("\\$", "").replace("$", "")
    text, last = _FRACTION.sub(_SLASH, text), None
    for match in _NUMBER.finditer(text):
        last = match
    number = None if last is None else _fraction(last.group())
    if last is None or number is None:
        return None
    return number, _PERCENT.match(text, last.end()) is not None


def _fraction(number: str) -> Fraction | None:
    """Exact value of a match of _NUMBER; None if it is too large to be meant, or over 0."""
    above, _, below = number.replace(",", "").replace("−", "-").partition("/")
    exponent = re.search(r"[eE][-+]?([0-9]+)$", above)
    if len(number) > _MAX_CHARACTERS or (exponent and len(exponent.group(1)) > 3):
        return None
    if below and int(below) == 0:
        return None
    return Fraction(above) / int(below or 1)
