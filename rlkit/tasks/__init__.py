"""Tasks: generated prompts with verifiers, scoring, evaluation."""

from rlkit.tasks.files import from_gsm8k, from_jsonl
from rlkit.tasks.generated import add, countdown, reverse_digits, sort
from rlkit.tasks.gym import from_reasoning_gym
from rlkit.tasks.listed import from_list
from rlkit.tasks.refill import fill_groups
from rlkit.tasks.score import evaluate, pass_at_k, score
from rlkit.tasks.task import PromptStream, Task, prompt_batch

__all__ = [
    "PromptStream",
    "Task",
    "add",
    "countdown",
    "evaluate",
    "fill_groups",
    "from_gsm8k",
    "from_jsonl",
    "from_list",
    "from_reasoning_gym",
    "pass_at_k",
    "prompt_batch",
    "reverse_digits",
    "score",
    "sort",
]
