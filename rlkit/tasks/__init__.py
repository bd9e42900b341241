"""Tasks: generated prompts with verifiers, scoring, evaluation."""

from rlkit.tasks.generated import add, countdown, reverse_digits, sort
from rlkit.tasks.score import evaluate, score
from rlkit.tasks.task import Task

__all__ = ["Task", "add", "countdown", "evaluate", "reverse_digits", "score", "sort"]
