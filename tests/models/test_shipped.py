"""The warm start that the wheel carries."""

import torch

import rlkit as rk
from rlkit.models import char_tokenizer
from rlkit.models.tiny import WEIGHTS
from rlkit.tasks.score import judge


def sampled_accuracy(model: rk.models.Pretrained, num: int) -> float:
    """Share of held-out prompts reversed to the character, at temperature 1."""
    task = rk.tasks.reverse_digits()
    worker = rk.RolloutWorker(model, max_new_tokens=12, max_rows=num)
    batch = worker.generate(task.held_out(num))
    return float(judge(task.verify, batch["prompt"], batch["response"], batch["answer"]).mean())


def test_shipped_weights_take_less_than_a_megabyte():
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*")) < 1_000_000


def test_warm_start_reverses_one_response_in_five():
    assert 0.1 < sampled_accuracy(rk.models.tiny(pretrained="reverse_digits"), 512) < 0.3


def test_random_weights_reverse_nothing():
    assert sampled_accuracy(rk.models.tiny(), 128) == 0


def test_warm_start_comes_in_float32():
    weights = rk.models.tiny(pretrained="reverse_digits").weights
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_warm_start_has_the_tokenizer_of_the_tasks():
    shipped, tasks = rk.models.tiny(pretrained="reverse_digits").tokenizer, char_tokenizer()
    assert shipped.__getstate__() == tasks.__getstate__()
