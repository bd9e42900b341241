import json
import math
import pickle

import pytest

from rlkit.config import (
    Layout,
    LearningRate,
    ModelSpec,
    OptimConfig,
    SamplingParams,
    constant,
    cosine,
    from_dict,
    linear,
    to_dict,
)

SIZES = {
    "vocab_size": 7,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
}


def factors(schedule: LearningRate, num: int) -> list[float]:
    return [schedule(step) for step in range(num)]


# ---- learning rates ----


def test_a_constant_rate_stays():
    assert factors(constant(), 3) == [1.0, 1.0, 1.0]


def test_a_warm_up_rises_in_equal_steps_and_reaches_the_full_rate():
    assert factors(constant(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_decay_reaches_its_end_at_the_total_and_stays():
    assert factors(linear(4), 6) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_linear_decay_starts_after_the_warm_up():
    schedule = linear(6, warmup_steps=2, final=0.2)
    assert factors(schedule, 8) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_cosine_decay_is_half_way_down_in_the_middle():
    root = math.sqrt(0.5)
    expected = [1.0, (1 + root) / 2, 0.5, (1 - root) / 2, 0.0, 0.0]
    assert factors(cosine(4), 6) == pytest.approx(expected)


def test_a_cosine_decay_ends_at_its_final_factor():
    schedule = cosine(5, warmup_steps=1, final=0.1)
    assert [schedule(1), schedule(3), schedule(5), schedule(99)] == pytest.approx(
        [1.0, 0.55, 0.1, 0.1]
    )


def test_a_schedule_shorter_than_its_warm_up_is_an_error():
    with pytest.raises(ValueError, match="total_steps: got 3, need more than warmup_steps=3"):
        linear(3, warmup_steps=3)


def test_a_negative_count_of_steps_is_an_error():
    with pytest.raises(ValueError, match=r"LearningRate\.warmup_steps: got -1"):
        constant(warmup_steps=-1)


# ---- model ----


def test_parameters_of_a_model_by_hand():
    attention = 6 * 8 + 2 * 6 * 4 + 8 * 6
    layer = attention + 3 * 6 * 5 + 2 * 6
    assert ModelSpec(**SIZES).num_parameters == 2 * layer + 2 * 7 * 6 + 6


def test_tied_embeddings_count_once():
    tied = ModelSpec(**SIZES, tie_embeddings=True)
    assert ModelSpec(**SIZES).num_parameters - tied.num_parameters == 7 * 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size: got 0, need at least 1"),
        ({"num_layers": 0}, "num_layers: got 0"),
        ({"head_dim": 3}, "head_dim: got 3, need an even number"),
        ({"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3; need a num_kv_heads that divides"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"num_heads": 0}, "num_heads: got 0, need at least 1"),
    ],
)
def test_a_shape_that_can_not_be_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelSpec(**(SIZES | changes))


# ---- layout, sampling, optimizer ----


def test_a_layout_takes_the_product_of_its_sizes():
    assert Layout(tp=2, pp=3, dp=4).num_devices == 24


@pytest.mark.parametrize("size", [0, -1, 1.0, "2"])
def test_a_layout_size_that_is_no_count_is_an_error(size):
    with pytest.raises(ValueError, match=r"Layout\.tp: got .*, need an integer of at least 1"):
        Layout(tp=size)


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_temperature_below_zero_or_not_finite_is_an_error(temperature):
    with pytest.raises(ValueError, match="temperature: got"):
        SamplingParams(temperature=temperature)


def test_no_new_tokens_are_an_error():
    with pytest.raises(ValueError, match="max_new_tokens: got 0, need at least 1"):
        SamplingParams(max_new_tokens=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 2)],
)
def test_a_cut_outside_its_range_is_an_error(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}, need"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("norm", [0, -1.0, math.nan])
def test_a_clip_at_zero_is_an_error(norm):
    with pytest.raises(ValueError, match="max_grad_norm: got"):
        OptimConfig(max_grad_norm=norm)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (0.9,), (-0.1, 0.9)])
def test_impossible_betas_are_an_error(betas):
    with pytest.raises(ValueError, match=r"betas: got .* need two numbers in \[0, 1\)"):
        OptimConfig(betas=betas)


# ---- as plain values ----


@pytest.mark.parametrize(
    "config", [ModelSpec(**SIZES), Layout(tp=2), SamplingParams(), LearningRate(warmup_steps=1)]
)
def test_a_config_comes_back_from_plain_values_and_from_pickle(config):
    assert from_dict(type(config), to_dict(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_inside_a_config_comes_back_too():
    config = OptimConfig(betas=(0.8, 0.9), lr_schedule=cosine(9))
    assert from_dict(OptimConfig, to_dict(config)) == config
    assert from_dict(OptimConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_unknown_keys_of_a_config_inside_are_named():
    with pytest.raises(ValueError, match=r"LearningRate: got unknown keys \['warmup'\]"):
        from_dict(OptimConfig, {"lr_schedule": {"warmup": 3}})


def test_unknown_keys_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"Layout: got unknown keys \['tq'\], need .*'tp', 'pp'"):
        from_dict(Layout, {"tq": 2})


def test_a_config_does_not_change():
    with pytest.raises(AttributeError):
        Layout().tp = 2
