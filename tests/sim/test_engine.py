"""An engine on a virtual clock: the closed form equals a loop over tokens."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_runs import small_run

from rlkit.config import Layout
from rlkit.sim import cost
from rlkit.sim.engine import Engine


def one_by_one(run, lengths):
    """Seconds until all rows are done, a token at a time, after the prompt's prefill."""
    prompt = run.workload.prompt_tokens
    clock_s = cost.prefill(run, prompt, prompt**2).seconds
    for step in range(max(lengths)):
        rows = sum(length > step for length in lengths)
        context = rows * (prompt + step)
        clock_s += cost.decode_step(run, rows, context).seconds
    return clock_s


def play(engine):
    """Run an engine to its end; returns (time, group, length) of each row."""
    ends, now_s = [], 0.0
    while math.isfinite(end_s := engine.next_end_s()):
        assert end_s >= now_s
        now_s = end_s
        ends += [(now_s, group, length) for group, length in engine.finish(now_s)]
    return ends


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12))
def test_the_closed_form_equals_a_loop_over_tokens(lengths):
    run = small_run()
    engine = Engine(run, 100, [])
    engine.add(0.0, 7, [float(length) for length in lengths])
    ends = play(engine)
    assert ends[-1][0] == pytest.approx(one_by_one(run, lengths), rel=1e-3)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30), st.integers(1, 8))
def test_every_row_finishes_once_whatever_the_room(lengths, room):
    engine = Engine(small_run(), room, [])
    for group, length in enumerate(lengths):
        engine.add(0.0, group, [float(length)])
        assert engine.running <= room
    ends = play(engine)
    assert sorted((group, length) for _, group, length in ends) == list(enumerate(lengths))
    assert engine.decoded == pytest.approx(sum(lengths), rel=1e-6)
    assert engine.context == pytest.approx(0.0, abs=1e-3)


def test_looking_in_between_changes_nothing():
    looked, left = (Engine(small_run(), 100, []) for _ in range(2))
    for engine in (looked, left):
        engine.add(0.0, 0, [100.0, 500.0, 900.0])
    for at_s in np.linspace(0.01, 0.9 * left.next_end_s(), 20):
        looked.advance(float(at_s))
    assert looked.next_end_s() == pytest.approx(left.next_end_s(), rel=1e-9)


@pytest.mark.parametrize("tp", [1, 8])
def test_an_interruption_costs_the_load_and_the_cache_again(tp):
    """One pass over all tokens: a collective's latency counts once, not once a token."""
    run = small_run(generate=Layout(tp=tp))
    engine = Engine(run, 100, [])
    engine.add(0.0, 0, [1000.0])
    at_s = engine.next_end_s() / 2
    engine.advance(at_s)
    written, before_s = engine.context, engine.next_end_s()
    again_s = engine.interrupt(at_s, 3.0)
    assert again_s == pytest.approx(cost.prefill(run, written, written**2).seconds, abs=1e-3)
    assert engine.next_end_s() == pytest.approx(before_s + 3.0 + again_s)


def test_rows_beyond_the_room_wait():
    engine = Engine(small_run(), 1, [])
    engine.add(0.0, 0, [10.0, 10.0])
    first, second = (end_s for end_s, _, _ in play(engine))
    assert second == pytest.approx(2 * first, rel=0.1)
