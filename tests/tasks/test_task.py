import pickle
import random
from itertools import chain

import pytest
import torch

import rlkit as rk
from rlkit.tasks.task import Task


def small_task(num: int, **changes) -> Task:
    """A task of ``num`` different prompts."""

    def draw(rng: random.Random) -> tuple[str, str]:
        return str(rng.randrange(num)), ""

    return Task("small", draw, verify=lambda prompt, response, answer: 1.0, **changes)


def texts(batches) -> list[list[str]]:
    return [batch["prompt"] for batch in batches]


def test_training_and_held_out_prompts_have_no_text_in_common():
    task = rk.tasks.add(digits=1)  # a hundred prompts: both splits see most of them
    training = {prompt for batch in texts(task.batches(size=500, steps=2)) for prompt in batch}
    held_out = set(task.held_out(200)["prompt"])
    assert len(training | held_out) > 90
    assert not training & held_out


def test_about_one_prompt_in_ten_is_held_out():
    task = rk.tasks.add(digits=1)
    held_out = set(task.held_out(500)["prompt"])
    assert 3 <= len(held_out) <= 20


def test_an_item_depends_on_seed_and_number_alone():
    one, two = rk.tasks.countdown(seed=3), rk.tasks.countdown(seed=3)
    two.item(9)
    list(two.batches(size=4, steps=2))
    assert one.item(5) == two.item(5)
    assert [rk.tasks.countdown(seed=4).item(i) for i in range(9)] != [one.item(i) for i in range(9)]


def test_a_stream_goes_on_where_it_stopped():  # faults I1
    task = rk.tasks.reverse_digits()
    whole = list(task.batches(size=4, steps=6))
    (fourth,) = task.batches(size=4, steps=1, start=3)
    assert fourth["prompt"] == whole[3]["prompt"]
    assert torch.equal(fourth["group_ids"], whole[3]["group_ids"])
    assert texts(task.batches(size=4, steps=3, start=3)) == texts(whole)[3:]


def test_an_uneven_batch_size_reads_the_same_stream():
    task = rk.tasks.reverse_digits()
    by_four, by_six = task.batches(size=4, steps=3), task.batches(size=6, steps=2)
    assert list(chain(*texts(by_four))) == list(chain(*texts(by_six)))


def test_groups_are_numbered_through_and_apart_from_the_held_out_ones():
    task = rk.tasks.reverse_digits()
    ids = torch.cat([batch["group_ids"] for batch in task.batches(size=4, steps=3)])
    assert ids.tolist() == list(range(12))
    assert not set(ids.tolist()) & set(task.held_out(12)["group_ids"].tolist())


def test_a_batch_has_text_answer_and_tokens_of_each_prompt():
    (batch,) = rk.tasks.add().batches(size=3, steps=1)
    tokenizer = rk.models.char_tokenizer()
    assert [ids.tolist() for ids in batch["prompt_ids"]] == [
        tokenizer.encode(prompt) for prompt in batch["prompt"]
    ]
    assert all(len(answer) == 3 for answer in batch["answer"])


def test_held_out_prompts_are_the_first_ones_however_many():
    task = rk.tasks.reverse_digits()
    assert task.held_out(3)["prompt"] == task.held_out(9)["prompt"][:3]


def test_a_task_too_small_to_split_says_so():
    with pytest.raises(ValueError, match="found no held-out prompt in 10,000 draws"):
        small_task(1).held_out(1)


def test_a_task_of_its_own_tokenizer_uses_it():
    tokenizer = rk.models.char_tokenizer("9876543210")
    (batch,) = small_task(1, tokenizer=tokenizer).batches(size=1, steps=1)
    assert batch["prompt_ids"].tolist() == [[1, 12]]


@pytest.mark.parametrize("changes", [{"size": 0}, {"steps": -1}, {"start": -1}])
def test_a_stream_of_impossible_size_is_an_error_at_once(changes):
    with pytest.raises(ValueError, match="need size >= 1, steps and start >= 0"):
        rk.tasks.sort().batches(**({"size": 1, "steps": 1} | changes))


def test_no_held_out_prompts_are_an_error():
    with pytest.raises(ValueError, match="held_out: got 0, need at least 1"):
        rk.tasks.sort().held_out(0)


def test_repr_shows_the_first_prompt():
    task = rk.tasks.sort(length=3)
    prompt, answer = task.item(0)
    assert repr(task) == f"Task('sort_3', first prompt {prompt!r} -> {answer!r})"


def test_a_verifier_travels_by_pickle():
    verify = pickle.loads(pickle.dumps(rk.tasks.countdown().verify))
    assert verify("3 2=05>", "2+3", "") == 1.0
