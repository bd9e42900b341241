"""Recipes: what they leave, and what they say of wrong calls."""

import dataclasses

import pytest

import rlkit as rk
from rlkit.recipes import GRPOConfig

SMALL = {"steps": 2, "size": 2, "n": 2, "max_new_tokens": 4, "eval_every": 1, "eval_prompts": 4}


@pytest.fixture(scope="module")
def cluster():
    return rk.launch(backend="local")


@pytest.fixture(scope="module")
def run(cluster):
    return rk.recipes.grpo(cluster, rk.models.tiny(), rk.tasks.sort(), GRPOConfig(**SMALL))


def test_the_trained_actor_is_left(run, tmp_path):
    assert run.actor.version == run.rollout.version == 2
    assert (run.actor.save_pretrained(tmp_path / "model") / "config.json").exists()
    accuracy = rk.evaluate(run.rollout, rk.tasks.sort().held_out(4), rk.tasks.sort().verify)
    assert accuracy["eval/accuracy"] == run.log.records[-1]["eval/accuracy"]


def test_what_is_left_shows_itself_in_a_line(run):
    parts = "actor, rollout, reference, resharder"
    assert repr(run) == f"Run(MetricLog(2 records, last step 1), {parts})"


def test_what_is_left_cannot_be_changed(run):
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.log = rk.MetricLog()


def test_lengths_and_signal_are_logged(run):
    for record in run.log.records:
        assert 1 <= record["response/length_mean_tokens"] <= 4
        assert record["group/signal_fraction"] in (0, 0.5, 1)


def test_the_hash_of_the_loss_is_that_of_its_numbers(cluster, run):
    def hash_of(**changes):
        config = GRPOConfig(**SMALL | {"steps": 1} | changes)
        again = rk.recipes.grpo(cluster, rk.models.tiny(), rk.tasks.sort(), config)
        return again.log.records[0]["actor/loss_hash"]

    assert hash_of() == run.log.records[0]["actor/loss_hash"] != hash_of(clip_high=0.3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 6}, r"got steps=6, need .* in a GRPOConfig.* Pass GRPOConfig\(steps=6\)"),
        ({"step": 6}, r"got step=6, .* GRPOConfig has \['steps'.* Did you mean 'steps'\?"),
        ({"config": {"steps": 6}}, "got dict as the config, need a GRPOConfig"),
        ({"config": 6}, "got int as the config, need a GRPOConfig"),
    ],
)
def test_numbers_outside_the_config_say_where_they_go(cluster, options, says):
    with pytest.raises(TypeError, match=f"grpo: {says}"):
        rk.recipes.grpo(cluster, rk.models.tiny(), rk.tasks.sort(), **options)
