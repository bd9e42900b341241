"""Positions in a stream of prompts, epochs and shuffles included (faults I1)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from short_run import PAIRS, make_task

import rlkit as rk


def take(stream, num: int) -> list[tuple[list[str], list[int]]]:
    batches = [next(stream) for _ in range(num)]
    return [(batch["prompt"], batch["group_ids"].tolist()) for batch in batches]


def test_five_prompts_in_batches_of_two_go_on_as_if_never_stopped():
    whole = take(make_task().stream(size=2), 10)
    stream = make_task().stream(size=2)
    first = take(stream, 3)  # reaches over the end of the first epoch
    state = json.loads(json.dumps(stream.save_state()))
    resumed = make_task().stream(size=2)
    resumed.load_state(state)
    assert first + take(resumed, 7) == whole


@given(stop=st.integers(0, 12), before=st.integers(1, 7), after=st.integers(1, 7))
def test_a_stream_goes_on_with_any_batch_size(stop, before, after):
    task = make_task()
    stream = task.stream(size=before)
    take(stream, stop)
    resumed = task.stream(size=after)
    resumed.load_state(stream.save_state())
    (prompts, groups), start = take(resumed, 1)[0], stop * before
    positions = [group - task.first_group_id() for group in groups]
    assert positions == list(range(start, start + after))
    assert prompts == [task.item(i)[0] for i in positions]


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    prompts = [make_task().item(i)[0] for i in range(40)]
    epochs = [prompts[i : i + 5] for i in range(0, 40, 5)]
    assert all(sorted(epoch) == sorted(prompt for prompt, _ in PAIRS) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 4


def test_another_seed_shuffles_otherwise():
    orders = {tuple(make_task(seed=s).item(i)[0] for i in range(5)) for s in range(9)}
    assert len(orders) > 4


def test_no_two_prompts_of_a_run_share_a_group():
    groups = [group for _, ids in take(make_task().stream(size=2), 9) for group in ids]
    assert groups == list(range(groups[0], groups[0] + 18))


def test_a_generated_task_streams_what_its_batches_have():
    task = rk.tasks.reverse_digits()
    listed = [(b["prompt"], b["group_ids"].tolist()) for b in task.batches(size=3, steps=4)]
    assert take(task.stream(size=3), 4) == listed
    assert take(task.stream(size=3, position=6), 2) == listed[2:]


def test_held_out_pairs_are_never_trained_on():
    task = rk.tasks.from_list(PAIRS, held_out=[("11>", "11")], verify=lambda p, r, a: 0.0)
    assert task.held_out(1)["prompt"] == ["11>"]
    assert "11>" not in {task.item(i)[0] for i in range(20)}


@pytest.mark.parametrize(
    "other",
    [
        make_task(seed=1),
        make_task(name="other"),
        rk.tasks.from_list(PAIRS[:4], verify=lambda p, r, a: 0.0),
        rk.tasks.reverse_digits(),
    ],
    ids=["seed", "name", "prompts", "generated"],
)
def test_a_position_in_another_task_is_an_error(other):
    stream = other.stream(size=2)
    with pytest.raises(ValueError, match="need the task, with the seed"):
        stream.load_state(make_task().stream(size=2, position=4).save_state())
    assert stream.position == 0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: make_task().stream(size=0), "size: got 0"),
        (lambda: make_task().stream(size=1, position=-1), "position: got -1"),
        (lambda: rk.tasks.from_list([], verify=None), "got no pairs"),
        (lambda: rk.tasks.from_list([("a", 1)], verify=None), r"got \('a', 1\)"),
        (lambda: make_task().held_out(1), "got more than the 0 prompts that are held out"),
    ],
)
def test_wrong_calls_say_what_is_needed(call, error):
    with pytest.raises(ValueError, match=error):
        call()
