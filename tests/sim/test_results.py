"""Simulated runs have the frames of real ones, and memory that does not suffice is a result."""

import math
from dataclasses import replace

import matplotlib
import pytest
from small_runs import WORKLOAD, shared_run, small_run

import rlkit as rk
import rlkit.sim as sim
from rlkit.config import Layout, ModelSpec
from rlkit.metrics import GLOSSARY
from rlkit.sim.memory import memory

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def found():
    return sim.simulate(small_run(), sim.asynchronous(max_staleness=1), steps=5)


def test_metrics_have_the_glossarys_names(found):
    assert set(found.frame().columns) <= set(GLOSSARY)
    assert found.frame()["step"].tolist() == [0, 1, 2, 3, 4]


def test_stages_of_the_trainer_fill_the_step(found):
    frame = found.frame().fillna(0.0)
    stages = ["dock", "generate", "logprobs", "update", "reshard"]
    parts = sum(frame[f"time/{stage}_s"] for stage in stages)
    assert parts.to_list() == pytest.approx(frame["time/step_s"].to_list())


def test_throughput_is_trained_tokens_over_time(found):
    frame = found.frame()
    lengths = frame["response/length_mean_tokens"] + WORKLOAD.prompt_tokens
    tokens = WORKLOAD.sequences * lengths
    assert (tokens / frame["time/step_s"]).to_list() == pytest.approx(
        frame["throughput/tokens_per_s"].to_list()
    )


@pytest.mark.parametrize("load_s", [2.0, 200.0])
def test_spans_of_a_worker_do_not_overlap(load_s):
    """Also where weights come faster than engines can load them."""
    run = small_run(reshard=sim.through_storage, costs=sim.Costs(load_s=load_s))
    found = sim.simulate(run, sim.asynchronous(max_staleness=3), steps=6)
    frame = found.trace.frame().sort_values(["worker", "start_s"])
    for _, spans in frame.groupby("worker"):
        later = spans["start_s"].to_numpy()[1:] - spans["end_s"].to_numpy()[:-1]
        assert (later > -1e-6).all()


def test_the_timeline_and_the_memory_of_a_simulated_run_are_drawn(found):
    frame = found.trace.frame()
    axes = rk.viz.plot_timeline(frame, source="simulated")
    assert "simulated" in axes.get_xlabel()
    assert len(axes.get_yticklabels()) == 13
    assert rk.viz.plot_memory(frame, source="simulated").patches
    assert rk.viz.plot_memory(memory(found.run).frame(), source="simulated").patches
    assert rk.viz.plot_phases(found.frame(), source="simulated").patches


def test_memory_of_a_trainer_by_hand():
    """tp 2, 4 data-parallel ranks of 1.544e9 weights: 2, 4 and 12 / 4 bytes a weight."""
    run = small_run(num_devices=20, train=Layout(tp=2))
    update = memory(run).update
    assert update["weights"] == pytest.approx(2 * 1.544e9 / 2, rel=1e-3)
    assert update["gradients"] == pytest.approx(4 * 1.544e9 / 2, rel=1e-3)
    assert update["optimizer"] == pytest.approx(12 * 1.544e9 / 2 / 4, rel=1e-3)
    context = memory(replace(run, train=Layout(tp=2, cp=4))).update  # the same ranks hold copies
    assert context["optimizer"] == update["optimizer"]
    assert context["activations"] == pytest.approx(update["activations"] / 4)


def test_optimizer_state_of_experts_is_spread_over_their_own_copies():
    """30B-A3B, 29e9 weights of experts over 8 devices, 2 copies; the rest over tp 4, 4 copies."""
    run = shared_run(model=ModelSpec.qwen3_30b_a3b(), train=Layout(tp=4, ep=8, expert_tp=1))
    experts = run.counts.expert_parameters
    by_hand = 12 * (experts / 8 / 2 + (run.counts.parameters - experts) / 4 / 4)
    assert memory(run).update["optimizer"] == pytest.approx(by_hand, rel=0.01)


def test_naive_resharding_keeps_the_trainers_weights_and_swapping_does_not():
    kept, swapped = (memory(shared_run(reshard=move)) for move in (sim.naive, sim.allgather_swap))
    more = kept.generate["weights"] - swapped.generate["weights"]
    assert more == pytest.approx(2 * 1.544e9 / 2, rel=0.2)
    assert swapped.generate["host_swap"] == pytest.approx(more)
    assert kept.max_rows <= swapped.max_rows


def test_every_stage_has_its_bounds(found):
    frame = found.bounds().set_index("stage")
    assert (frame["lower_s"] <= frame["seconds"]).all()
    assert (frame["seconds"] <= frame["upper_s"]).all()
    assert frame.loc["update", "seconds"] == pytest.approx(found.mean("time/update_s"), rel=0.2)


def test_out_of_memory_is_a_result_that_says_where():
    run = shared_run(model=ModelSpec.qwen25_32b(), train=Layout(tp=2), generate=Layout(tp=8))
    found = sim.simulate(run, sim.synchronous())
    assert found.out_of_memory.startswith("update: ")
    assert "GiB of 74.5 GiB" in found.out_of_memory
    assert math.isnan(found.step_s)
    assert math.isnan(found.tokens_per_s)
    assert "out of memory" in repr(found)
    assert not len(found.log)


def test_means_leave_the_warm_up_out(found):
    assert found.warm_up == 2
    assert found.step_s == pytest.approx(found.frame()["time/step_s"][2:].mean())
    assert found.tokens_per_s_per_device == pytest.approx(found.tokens_per_s / 16)


def test_a_run_without_moves_costs_nothing_for_them():
    bare = sim.simulate(small_run(reshard=None), sim.synchronous(), steps=2)
    assert bare.mean("time/reshard_s") == 0.0
    central = replace(small_run(), dock=sim.central)
    slow = sim.simulate(central, sim.synchronous(), steps=2)
    assert slow.step_s > bare.step_s
