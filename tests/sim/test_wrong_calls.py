"""Wrong runs, schedules and grids: what was got, what is needed."""

import math
from dataclasses import replace

import pytest
from small_runs import LENGTHS, WORKLOAD, small_run

import rlkit.sim as sim
from rlkit.config import Layout
from rlkit.sim import specs, study

ASYNC, ONE = sim.asynchronous(max_staleness=2), {"max_staleness": [1]}
COST = sim.cost.Cost(network_s=1.0)
MOVE = r"Run.dock: got None from no_cost\(run\), need a Moved. Return rk.sim.moves.Moved"


def no_cost(run):
    """A function of the user that forgot to return."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_run(num_devices=0), r"Run.num_devices: got 0, need at least 1"),
        (lambda: small_run(rollout_devices=-4), r"Run.rollout_devices: got -4, need at least 0"),
        (lambda: small_run(rollout_devices=16), "need at least one that trains"),
        (lambda: small_run(generate=Layout(cp=2)), "Run.generate: got cp=2, need cp=1"),
        (lambda: small_run(chunks=0), "Run.chunks: got 0"),
        (lambda: small_run(minibatches=0), "Run.minibatches: got 0"),
        (lambda: small_run(trained_share=0.0), "Run.trained_share: got 0.0, need .* above 0"),
        (lambda: small_run(cache_bytes=math.nan), "Run.cache_bytes: got nan"),
        (lambda: replace(WORKLOAD, prompts=0), "Workload.prompts: got 0"),
        (lambda: replace(WORKLOAD, prompt_tokens=-1), "Workload.prompt_tokens: got -1"),
        (lambda: replace(LENGTHS, mean_tokens=0), "mean_tokens: got 0, need 1 or more"),
        (lambda: replace(LENGTHS, limit_tokens=math.inf), "limit_tokens: got inf"),
        (lambda: replace(LENGTHS, sigma=math.nan), "sigma: got nan, need a finite number above 0"),
        (lambda: LENGTHS.cut(0), "limit_tokens: got 0"),
        (lambda: sim.Lengths.of_median(0, sigma=1.0, limit_tokens=9), "median_tokens: got 0"),
        (lambda: sim.Costs(decode_overhead_s=math.nan), "Costs.decode_overhead_s: got nan"),
        (lambda: sim.Costs(matmul_efficiency=1.5), "at most 1"),
        (lambda: sim.Costs(load_bytes_per_s=0.0), "Costs.load_bytes_per_s: got 0.0, .* above 0"),
        (lambda: replace(specs.H100, flops=math.nan), "Device.flops: got nan"),
        (lambda: replace(specs.NODE_H100, num_devices=0), "Node.num_devices: got 0"),
        (lambda: sim.fixed(-1.0), "seconds: got -1.0"),
        (lambda: sim.moves.Moved(cost=COST, num_bytes=-1.0), "Moved.num_bytes: got -1.0"),
        (lambda: sim.moves.Moved(cost=COST * math.nan, num_bytes=0.0), "cost.seconds: got nan"),
        (lambda: sim.asynchronous(max_staleness=-1), "max_staleness: got -1, need 0"),
        (lambda: sim.asynchronous(max_staleness=math.nan), "max_staleness: got nan"),
        (lambda: sim.asynchronous(max_staleness=1, max_running=0), "max_running: got 0"),
        (lambda: sim.simulate(small_run(), ASYNC, steps=0), "steps: got 0"),
        (lambda: sim.sweep(small_run(), ASYNC, {"max_staleness": []}), "list of one value or more"),
        (lambda: sim.sweep(small_run(), ASYNC, {"max_staleness": 4}), "got max_staleness=4"),
        (lambda: sim.stalenesses(small_run(), ASYNC, ()), r"got max_staleness=\[\]"),
        (lambda: sim.stalenesses(small_run(), ASYNC, (0, -1)), "got -1"),
    ],
)
def test_a_number_out_of_range_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_run(model="qwen25_9b"), "Run.model: got 'qwen25_9b', need a ModelSpec"),
        (lambda: sim.change(small_run(), ASYNC, generate=4), "Run.generate: got 4, need a Layout"),
        (lambda: small_run(num_devices=8.5), "Run.num_devices: got 8.5"),
        (lambda: small_run(reshard="swap"), "Run.reshard: got 'swap', need one of rk.sim.moves"),
        (lambda: small_run(dock=lambda: None), r"Run.dock: got .*need a function of \(run\)"),
        (lambda: sim.sweep(small_run(dock=no_cost), ASYNC, ONE), MOVE),
        (lambda: sim.simulate(small_run(reshard=no_cost), ASYNC), MOVE.replace("dock", "reshard")),
        (lambda: sim.moves.Moved(cost=1.0, num_bytes=0.0), "Moved.cost: got 1.0, need a Cost"),
        (
            lambda: sim.simulate(small_run(), sim.Schedule(start=no_cost)),
            "Schedule.start: got None, need a function .* an iterator of records",
        ),
        (
            lambda: study.predict({}, lambda row, parameters: None, study.Parameters()),
            r"build\(row, parameters\): got None, need a Plan",
        ),
        (lambda: sim.Costs(reward_s=None), "Costs.reward_s: got None"),
        (lambda: sim.simulate(ASYNC, small_run()), "run: got Schedule, need a Run"),
        (lambda: sim.sweep(small_run(), ASYNC, ["max_staleness"]), "over: got .*need a Mapping"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"generate": Layout(tp=4, dp=4)}, "generate: 12 devices, the layout needs 16"),
        ({"train": Layout(pp=8)}, "update: 4 devices, the layout needs 8"),
    ],
)
def test_a_layout_larger_than_its_devices_is_a_result_with_a_reason(changes, why):
    assert sim.simulate(small_run(**changes), ASYNC, steps=1).out_of_memory == why
