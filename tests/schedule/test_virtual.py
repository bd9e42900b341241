"""A virtual clock: calls take their time beside each other, in one thread and always alike."""

import pytest

from rlkit.schedule import Virtual, one_step_off, synchronous


def test_events_come_in_order_and_equal_times_as_planned():
    runs, seen = Virtual(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        runs.at(time_s, seen.append, name)
    assert runs.wait([runs.submit(runs.after, 3.0)])
    assert seen == ["a", "b", "c"]
    assert runs.now() == 3.0


def test_the_first_call_to_end_is_waited_for():
    runs = Virtual()
    slow, quick = runs.submit(runs.after, 5.0, "slow"), runs.submit(runs.after, 2.0, "quick")
    assert runs.wait([slow, quick]) == [quick]
    assert runs.now() == 2.0
    assert slow.result() == "slow"
    assert runs.now() == 5.0


def test_a_call_that_returns_no_future_takes_no_time():
    runs = Virtual()
    assert runs.run(len, "abc") == 3
    assert runs.now() == 0.0


def test_the_error_of_a_call_is_its_result():
    runs = Virtual()
    with pytest.raises(ZeroDivisionError):
        runs.run(lambda: 1 / 0)


def test_what_a_sleeping_call_submits_starts_when_something_has_happened():
    runs, seen = Virtual(), []

    def look():
        seen.append(runs.now())
        runs.sleep()
        if len(seen) < 3:
            runs.submit(look)

    runs.submit(look)
    runs.at(4.0, runs.wake)
    runs.run(runs.after, 6.0)
    assert seen == [0.0, 4.0]


def test_where_nothing_will_ever_happen_nothing_is_waited_for():
    runs = Virtual()
    assert runs.wait([runs.submit(Virtual().after, 1.0)]) == []


def steps(schedule, *, generate_s, train_s):
    """Virtual times at which three steps end; a move of weights takes a second."""
    runs = Virtual()

    def rollout_step(prompts):
        return runs.after(generate_s, prompts)

    def alone(call):
        return lambda *args: runs.run(call, *args)

    def train_step(batch):
        return runs.after(train_s, {})

    def sync():
        return runs.after(1.0)

    if schedule is one_step_off:
        parts = (rollout_step, print, train_step, alone(sync), runs)
    else:
        parts = (alone(rollout_step), print, alone(train_step), alone(sync))
    return [runs.now() for _ in schedule(range(3), *parts)]


def test_in_turn_a_step_takes_the_sum():
    assert steps(synchronous, generate_s=3.0, train_s=5.0) == [9.0, 18.0, 27.0]


def test_one_step_off_takes_the_longer_of_the_two():
    assert steps(one_step_off, generate_s=3.0, train_s=5.0) == [9.0, 15.0, 21.0]
    assert steps(one_step_off, generate_s=7.0, train_s=5.0) == [15.0, 23.0, 29.0]
