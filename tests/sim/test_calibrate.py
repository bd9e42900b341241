"""Rates from a trace: those that made its spans are found again."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import rlkit.sim as sim
from rlkit.config import ModelSpec
from rlkit.sim import cost, specs

SMALL = ModelSpec(
    vocab_size=64, hidden_size=64, intermediate_size=256, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16,
)  # fmt: skip
LENGTHS = sim.Lengths.of_median(16, sigma=1.0, limit_tokens=112, between=0.0)
WORK = sim.Workload(prompts=4, samples=4, prompt_tokens=8, lengths=LENGTHS)
UNKNOWN = sim.Run(model=SMALL, node=specs.NODE_CPU, num_devices=1, workload=WORK, recompute=False)
RATES = sim.Costs(
    decode_overhead_s=4e-3, decode_s_per_row=3e-5, trainer_s=0.1, trainer_s_per_sequence=0.0,
    train_bytes_per_flop=0.0, matmul_efficiency=1.0, reward_s=0.0, contention=0.5,
)  # fmt: skip
DEVICE = replace(specs.NODE_CPU.device, flops=3e9)
TRUE = replace(UNKNOWN, costs=RATES, node=replace(specs.NODE_CPU, device=DEVICE))


def turns(sizes, *, slow=1.0):
    """Spans of steps of these sizes on a machine of the true rates, 0.02 s apart, 0.03 s swaps."""
    rng, now_s, spans = np.random.default_rng(0), 0.0, []
    for prompts in sizes:
        lengths = LENGTHS.draw(rng, prompts, 4).reshape(-1)
        rows, responses = len(lengths), lengths.sum()
        tokens, squares = responses + 8 * rows, ((lengths + 8) ** 2).sum()
        steps = cost.decode_step(TRUE, 0, 0).other_s * lengths.max()
        row_s = cost.decode_step(TRUE, 1, 0).seconds - cost.decode_step(TRUE, 0, 0).seconds
        seconds = {
            "generate": steps + row_s * responses,
            "logprobs": cost.logprobs(TRUE, tokens, squares, rows).seconds,
            "update": cost.update(TRUE, tokens, squares, rows).seconds,
            "reshard": 0.03,
        }
        for stage, took_s in seconds.items():
            worker = {"generate": "rollout/0", "reshard": "driver"}.get(stage, "actor/0")
            took_s *= slow if worker == "actor/0" else 1.0
            facts = {"rows": rows, "tokens": int(tokens)} if stage != "reshard" else {}
            spans.append({"stage": stage, "worker": worker, "start_s": now_s, **facts})
            now_s += took_s
            spans[-1]["end_s"] = now_s
            now_s += 0.01
    return pd.DataFrame(spans).fillna({"rows": 0, "tokens": 0}).astype({"rows": int})


@pytest.fixture(scope="module")
def found():
    return sim.fit(turns([4, 16] * 30), UNKNOWN)


def test_the_rates_that_made_the_spans_are_found(found):
    assert found.costs.decode_overhead_s == pytest.approx(4e-3, rel=0.1)
    assert found.costs.decode_s_per_row == pytest.approx(3e-5, rel=0.5)
    assert found.costs.trainer_s == pytest.approx(0.1, rel=0.05)
    assert found.node.device.flops == pytest.approx(3e9, rel=0.1)
    assert found.reshard(found).cost.seconds == pytest.approx(0.03)
    assert found.dock(found).cost.seconds == pytest.approx(0.02)
    assert found.costs.contention == 0.0


def test_a_batch_that_was_never_run_is_predicted(found):
    spans = turns([32] * 20)
    seconds = (spans["end_s"] - spans["start_s"]).groupby(spans["stage"]).mean()
    larger = replace(found, workload=replace(WORK, prompts=32))
    simulated = sim.simulate(larger, sim.synchronous(), steps=20)
    assert simulated.mean("time/update_s") == pytest.approx(seconds["update"], rel=0.1)
    assert simulated.mean("time/generate_s") == pytest.approx(seconds["generate"], rel=0.15)


def test_what_workers_lose_beside_each_other_is_found():
    """Half of the trainer's time beside an engine, half as long again there."""
    both = turns([8] * 30, slow=1.25)
    engine = both[both["stage"] == "update"].assign(stage="generate", worker="rollout/0", rows=0)
    half = engine.assign(end_s=(engine["start_s"] + engine["end_s"]) / 2)
    beside = pd.concat([both[both["stage"].isin(["update", "reshard"])], half])
    found = sim.fit(turns([4, 16] * 30), UNKNOWN, beside=beside)
    # alone / took = 1 / 1.25; the half that was slowed did 0.8 - 0.5 of the work.
    assert found.costs.contention == pytest.approx(0.5 / 0.3 - 1, rel=0.15)


def test_slices_and_what_is_between_them_are_found():
    """Slices of 10 ms, 2 ms apart; one gap has a swap of 30 ms, which waited for half a slice."""
    start = np.arange(0, 100) * 0.012
    start[50:] += 0.03
    engine = pd.DataFrame({"stage": "generate", "worker": "rollout/0", "start_s": start})
    swap = {"stage": "reshard", "worker": "driver", "start_s": start[50] - 0.037}
    swap = pd.DataFrame([swap | {"end_s": swap["start_s"] + 0.035}])
    trained = turns([8] * 30).query("stage in ('logprobs', 'update')")
    beside = pd.concat([engine.assign(end_s=start + 0.01), swap, trained]).fillna(0)
    found = sim.fit(turns([4, 16] * 30), UNKNOWN, beside=beside)
    assert found.costs.slice_s == pytest.approx(0.01)
    assert found.costs.turn_s == pytest.approx(0.002)
    assert found.reshard(found).cost.seconds == pytest.approx(0.03)


def test_workers_that_share_a_core_take_as_long_as_one_after_the_other():
    run = replace(TRUE, num_devices=2, rollout_devices=1, costs=replace(RATES, contention=1.0))
    alone = replace(run, costs=replace(RATES, contention=0.0))
    schedule = sim.asynchronous(max_staleness=8)
    shared, apart = (sim.simulate(each, schedule, steps=30) for each in (run, alone))
    assert apart.step_s < shared.step_s
    assert shared.mean("time/update_s") <= 2 * apart.mean("time/update_s") * 1.01
    frame = shared.trace.frame().sort_values(["worker", "start_s"])
    for _, spans in frame.groupby("worker"):
        later = spans["start_s"].to_numpy()[1:] - spans["end_s"].to_numpy()[:-1]
        assert (later > -1e-6).all()


def test_one_size_of_batches_is_refused():
    with pytest.raises(ValueError, match=r"got generate spans of \[16\] rows, need two sizes"):
        sim.fit(turns([4, 4]), UNKNOWN)


def test_seconds_that_do_not_grow_with_tokens_are_refused():
    spans = turns([4, 16])
    flat = spans.assign(end_s=spans["start_s"] + 1 / (1 + spans["rows"]))
    with pytest.raises(ValueError, match="do not grow with their tokens"):
        sim.fit(flat, UNKNOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spans: spans.assign(tokens=np.nan), "without rows or tokens"),
        (lambda spans: spans.drop(columns="tokens"), "without rows or tokens"),
        (lambda spans: spans.assign(rows=spans["rows"] + 1), "need whole groups of .*samples=4"),
    ],
)
def test_spans_that_say_too_little_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        sim.fit(change(turns([4, 16])), UNKNOWN)


def test_a_fit_needs_the_run_that_was_traced():
    with pytest.raises(TypeError, match="run: got None, need a Run"):
        sim.fit(turns([4, 16]), None)
