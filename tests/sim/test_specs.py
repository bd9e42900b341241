"""Specs: every number has a source, and counts of weights are those of the shapes."""

import pytest

from rlkit.config import ModelSpec
from rlkit.sim import specs


@pytest.mark.parametrize("model", specs.MODELS, ids=lambda m: m.name)
def test_models_have_a_source_and_fewer_active_weights_than_all(model):
    assert model.source
    assert 0 < model.active_parameters <= model.parameters
    assert model.expert_parameters < model.parameters


@pytest.mark.parametrize("node", specs.NODES, ids=lambda n: n.device.name)
def test_nodes_have_a_source_and_name_what_is_assumed(node):
    assert node.source
    assert node.device.source
    for item in (node, node.device):
        assert all(hasattr(item, name) for name in item.assumed)


def test_weights_of_qwen25_7b_are_those_of_its_shape():
    shape = ModelSpec(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_heads=28,
        num_kv_heads=4, head_dim=128, qkv_bias=True,
    )  # fmt: skip
    assert specs.QWEN25_7B.parameters == pytest.approx(shape.num_parameters, rel=1e-3)


def test_weights_of_a_mixture_are_experts_and_the_rest():
    """R1: 58 layers of 256 experts of 3 x 7168 x 2048 are 653.9e9 weights of 671e9."""
    assert specs.DEEPSEEK_R1.expert_parameters == pytest.approx(653.9e9, rel=1e-3)
    assert specs.DEEPSEEK_R1.dense_bytes == pytest.approx(2 * 17.1e9, rel=0.01)


def test_a_token_of_qwen25_7b_keeps_57_kb():
    """28 layers x 2 x 4 heads x 128 x 2 bytes."""
    assert specs.QWEN25_7B.kv_bytes == 28 * 2 * 4 * 128 * 2


def test_one_token_touches_its_own_experts_and_many_touch_all():
    model = specs.QWEN3_30B_A3B
    assert model.expert_share(1) == pytest.approx(8 / 128)
    assert model.expert_share(1000) == pytest.approx(1.0)
    assert specs.QWEN25_7B.expert_share(1) == 1.0
