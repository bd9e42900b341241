"""The loops of the notebooks as functions, for scripts and experiments."""

from rlkit.recipes.dapo import DAPOConfig, dapo
from rlkit.recipes.grpo import GRPOConfig, grpo
from rlkit.recipes.loop import LoopConfig, Run
from rlkit.recipes.ppo import PPOConfig, ppo

__all__ = ["DAPOConfig", "GRPOConfig", "LoopConfig", "PPOConfig", "Run", "dapo", "grpo", "ppo"]
