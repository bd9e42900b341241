"""Schedules on a virtual clock: what each keeps, and that samples are neither lost nor doubled."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import WORKLOAD, shared_run, small_run

import rlkit.sim as sim
from rlkit.config import Layout
from rlkit.sim.events import Loop
from rlkit.sim.memory import memory

SCHEDULES = {
    "synchronous": sim.synchronous(),
    "one_step_off": sim.one_step_off(),
    "asynchronous": sim.asynchronous(max_staleness=2),
    "waiting": sim.asynchronous(max_staleness=2, interrupt=False),
    "share": sim.asynchronous(max_staleness=0.5),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_same_seed_gives_the_same_frames(schedule):
    one, two, other = (
        sim.simulate(small_run(), schedule, steps=4, seed=seed) for seed in (1, 1, 2)
    )
    assert one.frame().equals(two.frame())
    assert one.trace.frame().equals(two.trace.frame())
    assert not one.frame().equals(other.frame())


class Counted(Loop):
    """Counts groups that have begun, and those that were trained."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.begun, self.trained, self.most, self._add = [], [], 0, self.generation.add
        self.generation.add = self.add

    def add(self, prompts):
        self.begun += [group.number for group in prompts.rows]
        self.most = max(self.most, len(self.begun) - len(self.trained))
        self._add(prompts)

    def train_step(self, batch):
        future = super().train_step(batch)
        future.add_done_callback(lambda _: self.trained.extend(g.number for g in batch.rows))
        return future


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_group_is_trained_at_most_once_and_whole(schedule):
    run = small_run(trained_share=0.7)
    loop = Counted(run, schedule, memory(run), seed=0)
    out = loop.play(6)
    assert len(loop.trained) == len(set(loop.trained)) == 6 * WORKLOAD.prompts
    assert set(loop.trained) <= set(loop.begun)
    assert len(loop.begun) == len(set(loop.begun))
    assert out.trained_rows == 6 * WORKLOAD.sequences
    assert out.dropped_tokens > 0


@settings(max_examples=20)
@given(st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_work_in_flight_never_exceeds_the_bound(max_staleness, interrupt, seed):
    run = small_run()
    schedule = sim.asynchronous(max_staleness=max_staleness, interrupt=interrupt)
    loop = Counted(run, schedule, memory(run), seed=seed)
    loop.play(4)
    assert loop.most == (max_staleness + 1) * WORKLOAD.prompts


def test_synchronous_samples_are_never_stale():
    for run in (small_run(), shared_run()):
        frame = sim.simulate(run, sim.synchronous(), steps=4).frame()
        assert (frame["staleness/max_steps"] == 0).all()


def test_one_step_off_is_one_step_behind_after_the_first():
    frame = sim.simulate(small_run(), sim.one_step_off(), steps=5).frame()
    assert frame["staleness/max_steps"].tolist() == [0, 1, 1, 1, 1]


def test_more_staleness_is_quicker_until_the_trainer_is_busy_all_the_time():
    seconds = [
        sim.simulate(small_run(), sim.asynchronous(max_staleness=most), steps=12).step_s
        for most in (0, 1, 4)
    ]
    assert seconds[0] > 1.2 * seconds[1]
    assert seconds[1] >= 0.98 * seconds[2]


def test_finishing_before_weights_are_loaded_costs_time_where_generation_is_the_bottleneck():
    run = small_run(rollout_devices=4, train=Layout())
    waits, stops = (
        sim.simulate(run, sim.asynchronous(max_staleness=2, interrupt=stop), steps=10).step_s
        for stop in (False, True)
    )
    assert waits > stops


def test_a_trainer_that_takes_pieces_starts_earlier():
    whole, pieces = (
        sim.simulate(small_run(chunks=chunks), sim.asynchronous(max_staleness=0), steps=4).step_s
        for chunks in (1, 4)
    )
    assert pieces < whole


def test_groups_come_at_the_end_of_a_slice():
    """An engine that waits as long as it generates takes twice as long, and the rest of a slice."""
    costs = replace(small_run().costs, reward_s=0.0)
    alone, sliced = (
        sim.simulate(
            small_run(costs=replace(costs, slice_s=each, turn_s=each)),
            sim.asynchronous(max_staleness=0), steps=4,
        ).mean("time/generate_s")
        for each in (0.0, 0.5)
    )  # fmt: skip
    assert 2 * alone <= sliced <= 2 * alone + 1.0


def test_new_weights_wait_for_the_end_of_a_slice():
    costs = replace(small_run().costs, slice_s=5.0)
    run, schedule = small_run(costs=costs), sim.asynchronous(max_staleness=2)
    waits = sim.simulate(run, schedule, steps=20).mean("time/reshard_s")
    alone = run.reshard(run).cost.seconds
    assert alone < waits < alone + 5.0


def test_a_synchronous_run_has_no_slices():
    run = shared_run(costs=replace(small_run().costs, slice_s=5.0, turn_s=5.0))
    plain = replace(run, costs=replace(run.costs, slice_s=0.0))
    first, second = (sim.simulate(each, sim.synchronous(), steps=2) for each in (run, plain))
    assert first.step_s == second.step_s


def test_devices_that_take_turns_cannot_run_asynchronously():
    with pytest.raises(ValueError, match="rollout_devices: got 0 with"):
        sim.simulate(shared_run(), sim.asynchronous(max_staleness=1))


def test_no_bound_at_all_is_refused():
    with pytest.raises(ValueError, match="max_staleness: got inf without max_running"):
        sim.asynchronous(max_staleness=math.inf)


def test_without_a_bound_on_staleness_groups_that_run_are_bounded():
    schedule = sim.asynchronous(max_staleness=math.inf, max_running=8)
    assert schedule.steady_steps == 40
    run = small_run()
    loop = Loop(run, schedule, memory(run), seed=0)
    loop.play(3)
    assert 0 < loop.generation.num_running <= 8


def test_only_asynchronous_has_a_bound_to_change():
    with pytest.raises(ValueError, match="max_staleness: got 2, need asynchronous"):
        sim.change(small_run(), sim.one_step_off(), max_staleness=2)


def test_filtered_groups_are_generated_again():
    kept = sim.simulate(small_run(), sim.synchronous(), steps=3)
    half = sim.simulate(small_run(trained_share=0.5), sim.synchronous(), steps=3)
    assert half.mean("time/generate_s") > kept.mean("time/generate_s")


def test_no_step_is_quicker_than_its_stages_lower_bounds():
    from rlkit.sim import cost

    run = small_run()
    found = sim.simulate(run, sim.asynchronous(max_staleness=2), steps=8)
    tokens, squares = (WORKLOAD.sequences * each for each in run.moments)
    floor_s = cost.update(run, 0.5 * tokens, 0.5 * squares, WORKLOAD.sequences).lower_s
    assert (found.frame()["time/step_s"] > floor_s).all()


def test_384_devices_are_simulated_at_full_scale():
    """Four steps here; a hundred of them are a minute's work at most."""
    work = replace(WORKLOAD, prompts=512, samples=16)
    run = small_run(num_devices=384, rollout_devices=288, workload=work)
    found = sim.simulate(run, sim.asynchronous(max_staleness=1), steps=4)
    assert found.run.num_engines == 288
    assert found.step_s > 0
