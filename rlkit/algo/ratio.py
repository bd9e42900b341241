"""Ratios of probabilities from differences of logprobs."""

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Ratios count as e^20 = 4.9e8 at most: fp32 overflows at e^88.7, and inf * 0 is NaN."""


def bounded(log_ratio: Tensor) -> Tensor:
    """log_ratio, of any shape, with a value of at most 20 and a gradient of 1 wherever it lies.

    A clamp alone would take the gradient from tokens beyond it, which need it most.
    """
    fixed = log_ratio.detach()
    return fixed.clamp(max=MAX_LOG_RATIO) + (log_ratio - fixed)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), of any shape, at most e^20; never without a gradient."""
    return bounded(log_ratio).exp()
