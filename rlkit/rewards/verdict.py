"""A reward that says how it came about."""

from typing import Any


class Verdict(float):
    """A reward with its ``outcome``: ok, timeout or error.

    A verifier that failed gives ``Verdict(nan, "timeout")`` or ``Verdict(nan, "error")``: NaN takes
    the row out of its group, so that no response is punished for what the verifier did.
    """

    outcome: str

    def __new__(cls, value: float, outcome: str = "ok") -> "Verdict":  # noqa: D102
        self = super().__new__(cls, value)
        self.outcome = outcome
        return self

    def __getnewargs__(self) -> tuple[float, str]:
        return float(self), self.outcome

    def __repr__(self) -> str:
        return f"Verdict({float(self)}, {self.outcome!r})"


def as_reward(value: Any, where: str = "") -> float:
    """The number that a reward function returned, of NumPy or torch, too; TypeError for others."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(
            f"reward function: got {type(value).__name__}{where}, need a float, one number a "
            "response."
        )
    return Verdict(value, value.outcome) if isinstance(value, Verdict) else float(value)


def outcome_of(value: float) -> str:
    """The outcome of a verdict; ok for any other number."""
    return value.outcome if isinstance(value, Verdict) else "ok"
