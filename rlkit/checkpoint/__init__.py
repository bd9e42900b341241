"""Checkpoints: save a run between two steps and go on from there, to the bit."""

from rlkit.checkpoint.checkpointer import Checkpointer, Restored, SaveReport

__all__ = ["Checkpointer", "Restored", "SaveReport"]
