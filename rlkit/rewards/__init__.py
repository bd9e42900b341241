"""Rewards that take more than comparing text: they run in processes that can be killed.

Loads neither torch nor math-verify. Rewards that compare text are in ``rlkit.algo``.
"""

from rlkit.rewards.combine import Combined, combine, reward_metrics
from rlkit.rewards.killable import Killable, close
from rlkit.rewards.mathematics import math_verify
from rlkit.rewards.programs import Limits, Ran, Test, code_reward, isolation, run_tests
from rlkit.rewards.verdict import Verdict

__all__ = [
    "Combined",
    "Killable",
    "Limits",
    "Ran",
    "Test",
    "Verdict",
    "close",
    "code_reward",
    "combine",
    "isolation",
    "math_verify",
    "reward_metrics",
    "run_tests",
]
