"""Studies: a fit finds what made the numbers, errors are counted as they are."""

import math
from dataclasses import fields, replace

import numpy as np
import pandas as pd
import pytest
from small_runs import WORKLOAD, shared_run

import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.sim.study import BOUNDS, Parameters, Plan, fit, null, predict, summary
from rlkit.sim.work import FITTED

STEP = "time/step_s"


def build(row, parameters):
    run = shared_run(costs=parameters.costs(), train=Layout(), num_devices=row["devices"])
    lengths = replace(WORKLOAD.lengths, sigma=parameters.sigma)
    return Plan(
        run=replace(run, workload=replace(WORKLOAD, lengths=lengths)), schedule=sim.synchronous()
    )


def row(devices, metric=STEP, **facts):
    return {"devices": devices, "metric": metric, "block": "b", "system": "s", **facts}


def test_there_are_at_most_eight_fitted_parameters_each_with_bounds():
    names = [item.name for item in fields(Parameters)]
    assert len(names) <= 8
    assert set(BOUNDS) == set(names)
    assert set(FITTED) <= set(names)


def test_a_fit_finds_the_parameters_that_made_the_numbers():
    truth = Parameters(decode_overhead_s=9e-3, trainer_s_per_sequence=2e-2)
    cells = []
    for each in (row(8), row(32), row(16, "time/update_s"), row(16, "time/generate_s")):
        cells.append((each | {"value": predict(each, build, truth)}, build))
    names = ["decode_overhead_s", "trainer_s_per_sequence"]
    found = fit(cells, Parameters(), names=names)
    assert found.decode_overhead_s == pytest.approx(9e-3, rel=1e-3)
    assert found.trainer_s_per_sequence == pytest.approx(2e-2, rel=1e-3)
    assert found.sigma == Parameters().sigma


def test_a_fit_stays_within_its_bounds():
    each = row(16) | {"value": 1e6}
    found = fit([(each, build)], Parameters(), names=["decode_overhead_s"], rounds=3)
    assert found.decode_overhead_s == pytest.approx(BOUNDS["decode_overhead_s"][1])


def test_a_prediction_is_the_metric_on_the_publications_scale():
    plan = build(row(16), Parameters())
    found = sim.simulate(plan.run, plan.schedule, steps=4)
    assert predict(row(16), build, Parameters()) == pytest.approx(found.step_s)
    halved = lambda r, p: replace(build(r, p), scale=0.5)
    rate = predict(row(16, "throughput/tokens_per_s_per_device"), halved, Parameters())
    assert rate == pytest.approx(found.tokens_per_s_per_device / 2)


def test_the_null_model_scales_with_devices_and_weights():
    known = row(16, value=100.0), build(row(16), Parameters())
    assert null(row(32), build(row(32), Parameters()), [known]) == pytest.approx(50.0)
    plan = build(row(16), Parameters())
    large = replace(plan, run=replace(plan.run, model=ModelSpec.qwen25_7b()))
    assert null(row(16), large, [known]) == pytest.approx(100.0 * 7.616 / 1.544, rel=1e-3)
    rate = row(16, "throughput/tokens_per_s", value=100.0), plan
    other = row(32, "throughput/tokens_per_s")
    assert null(other, build(other, Parameters()), [rate]) == pytest.approx(200.0)
    assert math.isnan(null(other, plan, [known]))


def test_a_summary_counts_errors_and_runs_that_do_not_fit():
    frame = pd.DataFrame({"paper": [1.0] * 4, "value": [1.05, 0.8, 2.0, np.nan]})
    found = summary(frame)
    assert found["cells"] == 4
    assert (found["within_10"], found["within_25"], found["within_50"]) == (0.25, 0.5, 0.5)
    assert found["max"] == math.inf
    assert summary(frame.iloc[:3])["median"] == pytest.approx(0.2)
    assert summary(frame.iloc[:0]) == {}
