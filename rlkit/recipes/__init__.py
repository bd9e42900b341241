"""The loops of the notebooks as functions, for scripts and experiments."""

from rlkit.recipes.areal import AREALConfig, areal
from rlkit.recipes.dapo import DAPOConfig, dapo
from rlkit.recipes.grpo import GRPOConfig, grpo
from rlkit.recipes.loop import LoopConfig, Run
from rlkit.recipes.ppo import PPOConfig, ppo

__all__ = [
    "AREALConfig",
    "DAPOConfig",
    "GRPOConfig",
    "LoopConfig",
    "PPOConfig",
    "Run",
    "areal",
    "dapo",
    "grpo",
    "ppo",
]
