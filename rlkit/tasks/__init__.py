"""Tasks: generated prompts with verifiers, scoring, evaluation."""

from rlkit.tasks.generated import add, countdown, reverse_digits, sort
from rlkit.tasks.listed import from_list
from rlkit.tasks.refill import fill_groups
from rlkit.tasks.score import evaluate, score
from rlkit.tasks.task import PromptStream, Task, prompt_batch

__all__ = [
    "PromptStream",
    "Task",
    "add",
    "countdown",
    "evaluate",
    "fill_groups",
    "from_list",
    "prompt_batch",
    "reverse_digits",
    "score",
    "sort",
]
