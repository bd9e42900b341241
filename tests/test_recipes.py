"""Recipes: what they leave, and what they say of wrong calls."""

import ast
import dataclasses
import inspect
import math
import zlib

import pytest
import torch

import rlkit as rk
from rlkit.recipes import DAPOConfig, GRPOConfig, PPOConfig

SMALL = {"steps": 2, "size": 2, "n": 2, "max_new_tokens": 4, "eval_every": 1, "eval_prompts": 4}
CONFIGS = {"grpo": GRPOConfig, "ppo": PPOConfig, "dapo": DAPOConfig}
MORE = {"grpo": {}, "ppo": {"kl_coef": 0.1}, "dapo": {"overlong_soft": 2}}
PARTS = {
    "grpo": "actor, rollout, reference, resharder",
    "ppo": "actor, rollout, reference, critic, resharder",
    "dapo": "actor, rollout, resharder",
}
each_recipe = pytest.mark.parametrize("recipe", CONFIGS)


def even(prompt: str, response: str, answer: str) -> float:
    """A reward that is got half of the time, and hard to learn."""
    return float(zlib.crc32(f"{prompt}{response}".encode()) % 2 == 0)


def make_task():
    task = rk.tasks.sort()
    task.verify = even
    return task


def start(recipe, cluster=None, **options):
    changes = SMALL | MORE[recipe] | options.pop("config", {})
    cluster = cluster or rk.launch(backend="local")
    config = CONFIGS[recipe](**changes)
    return getattr(rk.recipes, recipe)(cluster, rk.models.tiny(), make_task(), config, **options)


@pytest.fixture(scope="module")
def cluster():
    return rk.launch(backend="local")


@pytest.fixture(scope="module")
def runs(cluster):
    return {recipe: start(recipe, cluster) for recipe in CONFIGS}


@each_recipe
def test_the_trained_actor_is_left(runs, recipe, tmp_path):
    run = runs[recipe]
    assert run.actor.version == run.rollout.version == 2
    assert (run.actor.save_pretrained(tmp_path / "model") / "config.json").exists()
    accuracy = rk.evaluate(run.rollout, make_task().held_out(4), even)
    assert accuracy["eval/accuracy"] == run.log.records[-1]["eval/accuracy"]


@each_recipe
def test_what_is_left_shows_itself_in_a_line(runs, recipe):
    assert repr(runs[recipe]) == f"Run(MetricLog(2 records, last step 1), {PARTS[recipe]})"


def test_what_is_left_cannot_be_changed(runs):
    with pytest.raises(dataclasses.FrozenInstanceError):
        runs["grpo"].log = rk.MetricLog()


@each_recipe
def test_lengths_are_logged(runs, recipe):
    for record in runs[recipe].log.records:
        assert 1 <= record["response/length_mean_tokens"] <= 4


def test_signal_is_logged(runs):
    for record in runs["grpo"].log.records:
        assert record["group/signal_fraction"] in (0, 0.5, 1)


@each_recipe
def test_what_is_logged_is_in_the_glossary(runs, recipe):
    for record in runs[recipe].log.records:
        assert record.keys() <= rk.metrics.GLOSSARY.keys()


@each_recipe
def test_the_hash_of_the_loss_is_that_of_its_numbers(cluster, runs, recipe):
    def hash_of(**changes):
        again = start(recipe, cluster, config={"steps": 1} | changes)
        return again.log.records[0]["actor/loss_hash"]

    assert hash_of() == runs[recipe].log.records[0]["actor/loss_hash"] != hash_of(clip_high=0.3)


@each_recipe
def test_a_run_stopped_and_gone_on_is_the_run_that_never_stopped(recipe, tmp_path):
    def run(steps, checkpoint=None):
        config = {"steps": steps, "lr": 1e-3, "save_every": 2, "size": 3}
        return start(recipe, config=config, checkpoint=checkpoint)

    expected, checkpoint = run(5), rk.Checkpointer(tmp_path)
    run(3, checkpoint)
    resumed = run(5, rk.Checkpointer(tmp_path))
    assert plain(resumed.log) == plain(expected.log)
    for group, same in [(resumed.actor, expected.actor), (resumed.critic, expected.critic)]:
        if group is not None:
            one, other = (g._transport.worker.backend.state_dict() for g in (group, same))
            assert all(torch.equal(one[name], other[name]) for name in one)


def plain(log):
    timed = ("time/", "throughput/")
    return [{k: v for k, v in r.items() if not k.startswith(timed)} for r in log.records]


def test_groups_left_over_are_trained_in_the_next_step(tmp_path):
    run = start("dapo", config={"size": 3, "steps": 6, "n": 4})
    assert {r["sampling/num_rounds"] for r in run.log.records} > {1.0}
    assert any(r["sampling/num_carried"] for r in run.log.records)


def test_dapo_without_signal_stops_and_says_so():
    task = make_task()
    task.verify = lambda prompt, response, answer: 1.0
    config = DAPOConfig(**SMALL, overlong_soft=2, max_rounds=3)
    with pytest.raises(RuntimeError, match=r"0 of the 2 .* 3 rounds and 6 prompts .*accuracy 1\)"):
        rk.recipes.dapo(rk.launch(backend="local"), rk.models.tiny(), task, config)


def test_dapo_filters_by_the_verifier_and_trains_on_the_reward():
    spread = lambda prompt, response, answer: float(zlib.crc32(response.encode()))
    run = start("dapo", config={"steps": 1}, reward_fn=spread)
    assert run.log.records[0]["sampling/accuracy"] <= 1 < run.log.records[0]["reward"]


def test_ppo_without_kl_has_no_reference(cluster):
    run = start("ppo", cluster, config={"steps": 1, "kl_coef": 0.0})
    assert run.reference is None
    assert "time/ref_logprobs_s" not in run.log.records[0]


def test_ppo_leaves_failed_rewards_out(cluster):
    task = make_task()
    task.verify = lambda prompt, response, answer: math.nan if len(response) % 2 else 1.0
    config = PPOConfig(**SMALL | {"size": 8, "steps": 1, "eval_every": 0})
    run = rk.recipes.ppo(cluster, rk.models.tiny(), task, config)
    assert run.log.records[0]["reward"] == 1.0
    assert run.log.records[0]["group/num_failed_rewards"] > 0


@each_recipe
def test_a_recipe_is_read_in_sixty_lines(recipe):
    lines = inspect.getsource(getattr(rk.recipes, recipe)).splitlines()
    assert len(lines) <= 60
    assert isinstance(ast.parse("\n".join(lines)).body[0], ast.FunctionDef)


@each_recipe
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 6}, r"got steps=6, need .* in a {0}.* Pass {0}\(steps=6\)"),
        ({"step": 6}, r"got step=6, .* {0} has \['steps'.* Did you mean 'steps'\?"),
        ({"config": {"steps": 6}}, "got dict as the config, need a {0}"),
        ({"config": 6}, "got int as the config, need a {0}"),
    ],
)
def test_numbers_outside_the_config_say_where_they_go(cluster, recipe, options, says):
    with pytest.raises(TypeError, match=f"{recipe}: {says.format(CONFIGS[recipe].__name__)}"):
        getattr(rk.recipes, recipe)(cluster, rk.models.tiny(), make_task(), **options)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "steps"), [("ppo", 60), ("dapo", 40)])
def test_reverse_digits_is_learnt(recipe, steps):
    task, model = rk.tasks.reverse_digits(length=6), rk.models.tiny(pretrained="reverse_digits")
    config = CONFIGS[recipe](steps=steps, eval_every=steps)
    run = getattr(rk.recipes, recipe)(rk.launch(backend="local"), model, task, config)
    assert run.log.records[-1]["eval/accuracy"] >= 0.9
