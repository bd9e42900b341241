import math
import zlib

import numpy as np
import pytest
import torch

import rlkit as rk
from rlkit.trace import current


def make_batch() -> rk.Batch:
    return rk.Batch.from_columns(
        {"prompt": ["p0", "p1"], "response": ["a", "b"], "answer": ["a", "a"]}
    )


def rewards(fn) -> torch.Tensor:
    batch = make_batch()
    batch["rewards"] = rk.score(fn, batch)
    return batch["rewards"]


def test_a_reward_is_of_prompt_response_and_answer_of_one_row():
    assert rewards(lambda *row: float(row == ("p0", "a", "a"))).tolist() == [1.0, 0.0]


NUMPY = [np.float64(1), np.float32(1), np.int8(1), np.bool_(True), np.array(1.0)]
TORCH = [torch.tensor(1.0), torch.tensor(1), torch.tensor(True), torch.ones((), requires_grad=True)]


@pytest.mark.parametrize("value", [True, 1, 1.0, *NUMPY, *TORCH])
def test_numbers_and_truth_values_are_rewards(value):
    assert rewards(lambda prompt, response, answer: value).tolist() == [1.0, 1.0]


def test_rewards_are_float32():
    assert rewards(lambda prompt, response, answer: 1).dtype == torch.float32


def test_nan_is_a_reward():
    for nan in (math.nan, np.float32("nan"), torch.tensor(math.nan)):
        assert rewards(lambda prompt, response, answer, nan=nan: nan).isnan().all()


@pytest.mark.parametrize("value", [None, "1", [1.0], (1.0, {}), torch.ones(1), np.ones(1)])
def test_anything_else_is_a_type_error_that_names_type_and_row(value):
    with pytest.raises(TypeError, match=f"got {type(value).__name__} on row 0, need a float"):
        rewards(lambda prompt, response, answer: value)


def test_an_error_of_the_function_keeps_its_type_and_names_the_row_and_its_text():
    def fails_on_b(prompt, response, answer):
        return 1 / (response != "b")

    with pytest.raises(ZeroDivisionError) as caught:
        rewards(fails_on_b)
    assert "row 1: prompt='p1', response='b', answer='a'" in caught.value.__notes__[0]


def test_scoring_is_a_span_of_the_trace():
    mark = current().mark()
    rewards(lambda prompt, response, answer: 1.0)
    assert [span.stage for span in current().since(mark)] == ["score"]


def test_accuracy_is_the_share_of_held_out_prompts_judged_right():
    task = rk.tasks.reverse_digits(length=2)
    worker = rk.RolloutWorker(rk.models.tiny(), max_new_tokens=3)

    def even(prompt, response, answer):
        return int(prompt[0]) % 2 == 0

    prompts = task.held_out(20)
    expected = np.mean([int(prompt[0]) % 2 == 0 for prompt in prompts["prompt"]])
    found = rk.evaluate(worker, prompts, even)
    assert found == {"eval/accuracy": pytest.approx(expected), "eval/num_failed": 0}


def test_verdicts_that_failed_are_counted_and_not_in_the_accuracy():
    worker, prompts = rk.RolloutWorker(rk.models.tiny()), rk.tasks.sort().held_out(4)
    first = prompts["prompt"][0]
    found = rk.evaluate(worker, prompts, lambda p, r, a: math.nan if p == first else 1.0)
    assert found == {"eval/accuracy": 1.0, "eval/num_failed": prompts["prompt"].count(first)}
    found = rk.evaluate(worker, prompts, lambda p, r, a: math.nan)
    assert math.isnan(found["eval/accuracy"])


def test_evaluation_is_greedy_and_repeatable():
    task = rk.tasks.reverse_digits()
    worker = rk.RolloutWorker(rk.models.tiny(pretrained="reverse_digits"), max_new_tokens=12)
    prompts = task.held_out(64)
    found = [rk.evaluate(worker, prompts, task.verify)["eval/accuracy"] for _ in range(2)]
    batch = worker.generate(prompts, temperature=0.0)
    assert found == [float(rk.score(task.verify, batch).load().values.mean())] * 2
    assert 0 < found[0] < 1


def test_evaluation_samples_n_responses_to_each_prompt():
    mark, worker = current().mark(), rk.RolloutWorker(rk.models.tiny(), max_new_tokens=2)
    prompts = rk.tasks.reverse_digits().held_out(3)
    rk.evaluate(worker, prompts, lambda prompt, response, answer: 0.0, n=2, temperature=1.0)
    assert [span.rows for span in current().since(mark)] == [6]


def test_evaluation_draws_the_same_samples_each_time_however_often(monkeypatch):
    monkeypatch.setattr("rlkit.batch.MAX_SAMPLES", 4)
    prompts = rk.tasks.reverse_digits().held_out(9)
    worker = rk.RolloutWorker(rk.models.tiny(), max_new_tokens=4)
    worker.generate(prompts, n=1)  # the numbers of its samples are not the evaluation's

    def digest(prompt, response, answer):
        return zlib.crc32(response.encode())

    sampled = {"n": 3, "temperature": 1.0}
    found = [rk.evaluate(worker, prompts, digest, **sampled) for _ in range(3)]
    assert found[0] == found[1] == found[2]


def test_evaluation_stops_responses_at_the_length_given():
    worker = rk.RolloutWorker(rk.models.tiny(), max_new_tokens=20)
    prompts = rk.tasks.reverse_digits().held_out(20)

    def short(prompt, response, answer):
        return len(response) <= 4

    sampled = {"temperature": 1.0, "n": 2}
    assert rk.evaluate(worker, prompts, short, **sampled)["eval/accuracy"] < 1
    assert rk.evaluate(worker, prompts, short, max_new_tokens=4, **sampled)["eval/accuracy"] == 1


def test_the_time_of_an_evaluation_is_not_counted_as_generation_or_scoring():
    mark, worker = current().mark(), rk.RolloutWorker(rk.models.tiny(), max_new_tokens=2)
    rk.evaluate(worker, rk.tasks.sort().held_out(2), rk.tasks.sort().verify)
    assert {span.stage for span in current().since(mark)} == {"evaluate"}
