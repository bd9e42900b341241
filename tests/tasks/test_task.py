import pickle
import random
import subprocess
import sys
from functools import partial
from itertools import chain, pairwise

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
    assert (ids - ids[0]).tolist() == list(range(12))
    assert not set(ids.tolist()) & set(task.held_out(12)["group_ids"].tolist())


def test_tasks_of_one_run_share_no_group_ids():
    pairs = [("1>", "1"), ("2>", "2")]
    tasks = [rk.tasks.sort(seed=seed) for seed in range(3)] + [rk.tasks.sort(length=5)]
    for others in (pairs, pairs[:1]):
        tasks.append(rk.tasks.from_list(others, held_out=pairs, verify=tasks[0].verify))
    halves = [(task.first_group_id(), task.first_group_id(held_out=True)) for task in tasks]
    firsts = sorted(first for half in halves for first in half)
    assert all(b - a >= 1 << 32 for a, b in pairwise(firsts))
    assert firsts[-1] < 1 << 46


def test_group_ids_of_a_task_are_the_same_whatever_tasks_there_are():
    code = "import rlkit as rk; print(rk.tasks.sort(length=5).first_group_id())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == rk.tasks.sort(length=5).first_group_id()


def test_tasks_of_one_hash_get_ranges_next_to_each_other(monkeypatch):
    monkeypatch.setattr("rlkit.tasks.task._ranges", {})
    monkeypatch.setattr("rlkit.tasks.task.TASK_BITS", 1)
    found = [rk.tasks.sort(seed=seed).first_group_id() for seed in range(2)]
    assert sorted(found) == [0, 1 << 32]
    assert rk.tasks.sort(seed=1).first_group_id() == found[1]
    with pytest.raises(ValueError, match="more than 2 different tasks"):
        rk.tasks.sort(seed=2).first_group_id()


@pytest.mark.parametrize("group_id", [-1, 1 << 47])
def test_a_group_id_without_room_for_sample_numbers_is_an_error(group_id):
    make = partial(rk.tasks.prompt_batch, [("1>", "")], tokenizer=rk.models.char_tokenizer())
    assert len(make(group_ids=[(1 << 47) - 1])) == 1
    with pytest.raises(ValueError, match=f"group_ids: got {group_id}, need 0 to 2.47 - 1"):
        make(group_ids=[group_id])


def test_a_prompt_number_beyond_the_range_is_an_error():
    with pytest.raises(ValueError, match=r"need less than 2\^32"):
        next(rk.tasks.sort().stream(size=1, position=1 << 32))


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
    with pytest.raises(ValueError, match=r"got (0|-1), need at least"):
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
