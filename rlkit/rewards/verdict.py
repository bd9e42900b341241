"""A reward that says how it came about."""


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


def outcome_of(value: float) -> str:
    """The outcome of a verdict; ok for any other number."""
    return value.outcome if isinstance(value, Verdict) else "ok"
