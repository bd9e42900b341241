"""Specs: every number has a source, and counts of weights are those of the shapes."""

from dataclasses import fields

import pytest
from small_runs import small_run

from rlkit.config import ModelSpec
from rlkit.sim import Costs, constants, specs
from rlkit.sim.work import CALIBRATED, FITTED, SOURCED

R1 = specs.counts(ModelSpec.deepseek_r1_671b())


@pytest.mark.parametrize("node", specs.NODES, ids=lambda n: n.device.name)
def test_nodes_have_a_source_and_name_what_is_assumed(node):
    assert node.source
    assert node.device.source
    for item in (node, node.device):
        assert all(hasattr(item, name) for name in item.assumed)


def test_every_constant_of_a_run_is_fitted_assumed_or_has_a_source():
    fitted = dict.fromkeys(FITTED + CALIBRATED, 1.5)
    frame = constants(small_run(costs=Costs(**fitted))).set_index("name")
    assert set(frame["kind"]) == {"fitted", "assumed", "source"}
    assert set(frame.index[frame["kind"] == "fitted"]) == {f"costs.{name}" for name in fitted}
    assert "fitted" not in set(constants(small_run())["kind"])
    assert (frame.loc[frame["kind"] == "source", "source"].str.len() > 0).all()
    names = {item.name for item in fields(Costs)}
    assert {f"costs.{name}" for name in names} <= set(frame.index)
    assert {*FITTED, *SOURCED} <= names
    assert frame.loc["device.host_bytes_per_s", "kind"] == "assumed"


def test_weights_of_a_mixture_are_experts_and_the_rest():
    """R1: 58 layers of 256 experts of 3 x 7168 x 2048 are 653.9e9 weights of 671e9."""
    assert R1.expert_parameters == pytest.approx(653.9e9, rel=1e-3)
    assert R1.dense_bytes == pytest.approx(2 * 17.1e9, rel=0.01)


def test_active_weights_are_those_that_the_models_names_say():
    """235B-A22B, and 37e9 of DeepSeek-V3 (2412.19437, abstract)."""
    assert R1.active_parameters == pytest.approx(37e9, rel=0.03)
    large = specs.counts(ModelSpec.qwen3_235b_a22b())
    assert large.parameters == pytest.approx(235e9, rel=0.01)
    assert large.active_parameters == pytest.approx(22e9, rel=0.02)


def test_numbers_that_a_token_keeps_a_layer():
    """Qwen2.5-7B: keys and values of 4 heads of 128; R1: the latent of 512 and 64 rotated."""
    assert specs.counts(ModelSpec.qwen25_7b()).kv_size == 2 * 4 * 128
    assert R1.kv_size == 576


def test_one_token_touches_its_own_experts_and_many_touch_all():
    mixture = specs.counts(ModelSpec.qwen3_30b_a3b())
    assert mixture.expert_share(1) == pytest.approx(8 / 128)
    assert mixture.expert_share(1000) == pytest.approx(1.0)
    assert specs.counts(ModelSpec.qwen25_7b()).expert_share(1) == 1.0
