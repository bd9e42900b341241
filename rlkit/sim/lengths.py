"""How long responses are: a lognormal, cut at a limit."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from rlkit.checks import finite

MEAN_STEPS = 60  # of the bisection for the log-mean: 2^-60 of the range


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Response lengths: lognormal, cut at the limit (a response that long ends there)."""

    mean_tokens: float
    """Mean after the cut."""
    sigma: float
    """Standard deviation of the log length before the cut: how long the tail is."""
    limit_tokens: int
    """Longest response."""
    between: float = 0.5
    """Share of the log variance that lies between prompts; the rest is within a group."""

    def __post_init__(self) -> None:
        finite("limit_tokens", self.limit_tokens, least=1.0)
        finite("sigma", self.sigma, above=True)
        finite("between", self.between, most=1.0)
        if not 1 <= self.mean_tokens < self.limit_tokens:
            raise ValueError(
                f"mean_tokens: got {self.mean_tokens}, need 1 or more and less than limit_tokens="
                f"{self.limit_tokens}."
            )

    @classmethod
    def of_median(
        cls, median_tokens: float, *, sigma: float, limit_tokens: int, between: float = 0.5
    ) -> "Lengths":
        """By the median before the cut, in place of the mean after it."""
        finite("median_tokens", median_tokens, least=1.0)
        finite("limit_tokens", limit_tokens, least=1.0)
        finite("sigma", sigma, above=True)
        mean = _cut_mean(math.log(median_tokens), sigma, float(limit_tokens))
        return cls(mean_tokens=mean, sigma=sigma, limit_tokens=limit_tokens, between=between)

    @property
    def log_mean(self) -> float:
        """Mean of the log length for which the mean after the cut is ``mean_tokens``."""
        return _log_mean(self.mean_tokens, self.sigma, float(self.limit_tokens))

    def cut(self, limit_tokens: int) -> "Lengths":
        """The same responses under another limit."""
        finite("limit_tokens", limit_tokens, least=1.0)
        mean = _cut_mean(self.log_mean, self.sigma, float(limit_tokens))
        return replace(self, limit_tokens=limit_tokens, mean_tokens=mean)

    def draw(self, rng: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Lengths [groups, samples] in tokens."""
        shared = rng.standard_normal((groups, 1)) * math.sqrt(self.between)
        own = rng.standard_normal((groups, samples)) * math.sqrt(1 - self.between)
        lengths = np.exp(self.log_mean + self.sigma * (shared + own))
        return np.clip(lengths, 1, self.limit_tokens)

    def longest(self, num: float) -> float:
        """About the longest of so many responses: their quantile num / (num + 1)."""
        z = NormalDist().inv_cdf(num / (num + 1.0))
        return min(self.limit_tokens, math.exp(self.log_mean + self.sigma * z))

    def moments(self) -> tuple[float, float]:
        """Mean of the length and of its square: that of X^2 is the mean of another lognormal."""
        square = _cut_mean(2 * self.log_mean, 2 * self.sigma, float(self.limit_tokens) ** 2)
        return self.mean_tokens, square


def _cdf(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _cut_mean(mu: float, sigma: float, limit: float) -> float:
    """E[min(X, limit)] of a lognormal X."""
    z = (math.log(limit) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * _cdf(z - sigma) + limit * (1 - _cdf(z))


@lru_cache(maxsize=4096)
def _log_mean(mean: float, sigma: float, limit: float) -> float:
    """Bisection: the mean after the cut grows with the log-mean."""
    low, high = math.log(mean) - sigma**2 - 5, math.log(limit) + 8 * sigma
    for _ in range(MEAN_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _cut_mean(middle, sigma, limit) < mean else (low, middle)
    return (low + high) / 2
