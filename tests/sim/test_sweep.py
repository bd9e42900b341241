"""Sweeps: a row a combination, the best first, reasons where nothing fits."""

import pytest
from small_runs import shared_run, small_run

import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec

ASYNC = sim.asynchronous(max_staleness=2)


def test_a_sweep_has_a_row_a_combination_of_run_and_schedule():
    frame = sim.sweep(
        small_run(), ASYNC, {"rollout_devices": [8, 12], "max_staleness": [0, 2]}, steps=3
    )
    assert frame[["rollout_devices", "max_staleness"]].values.tolist() == [
        [8, 0], [8, 2], [12, 0], [12, 2],
    ]  # fmt: skip
    assert (frame["step_s"] > 0).all()


def test_a_row_is_what_the_run_alone_gives():
    frame = sim.sweep(small_run(), ASYNC, {"rollout_devices": [8]}, steps=5, seed=3)
    alone = sim.simulate(small_run(rollout_devices=8), ASYNC, steps=5, seed=3)
    assert frame["step_s"].item() == alone.step_s
    assert frame["tokens_per_s"].item() == alone.tokens_per_s


def test_splits_leave_whole_trainers_and_engines_the_best_first():
    frame = sim.splits(small_run(train=Layout(pp=4)), ASYNC, steps=3)
    assert sorted(frame["rollout_devices"]) == [4, 8, 12]
    assert frame["tokens_per_s"].is_monotonic_decreasing


def test_layouts_that_do_not_fit_come_last_with_a_reason():
    frame = sim.layouts(shared_run(model=ModelSpec.qwen25_32b()), sim.synchronous(), steps=1)
    fits = frame["out_of_memory"] == ""
    assert fits.iloc[0]
    assert not fits.iloc[-1]
    assert fits.is_monotonic_decreasing
    assert (frame.loc[fits, "peak_gib"] < 75).all()


def test_staleness_stops_paying_once_the_trainer_never_waits():
    frame = sim.stalenesses(small_run(), ASYNC, bounds=(0, 1, 4))
    assert frame["step_s"].iloc[0] > frame["step_s"].iloc[1]
    assert frame["trainer_waits"].iloc[2] < 0.05


def test_a_wrong_combination_ends_a_sweep_before_any_is_simulated(monkeypatch):
    monkeypatch.setattr(sim, "simulate", None)
    with pytest.raises(ValueError, match="rollout_devices: got 16 of 16 devices"):
        sim.sweep(small_run(), ASYNC, {"rollout_devices": [8, 16]})


def test_a_sweep_by_itself_takes_steps_enough_for_its_largest_staleness():
    frame = sim.stalenesses(small_run(), ASYNC, bounds=(0, 1))
    alone = sim.simulate(small_run(), sim.asynchronous(max_staleness=0), steps=10)
    assert frame["tokens_per_s"][0] == alone.tokens_per_s


def test_a_field_of_a_part_is_named_with_its_part():
    with pytest.raises(ValueError, match=r"workload=replace\(run.workload, samples=\.\.\.\)"):
        sim.sweep(small_run(), ASYNC, {"samples": [4, 8]})


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="Did you mean 'max_staleness'"):
        sim.sweep(small_run(), ASYNC, {"max_stalenes": [1]})


def test_too_few_devices_for_any_split_are_named():
    with pytest.raises(ValueError, match="splits: got 16 devices"):
        sim.splits(small_run(generate=Layout(tp=4, dp=4)), ASYNC)
