"""Recipes: what they leave, and what they say of wrong calls."""

import ast
import dataclasses
import functools
import inspect
import math
import zlib

import pytest
import torch

import rlkit as rk
from rlkit.recipes import AREALConfig, DAPOConfig, GRPOConfig, PPOConfig

SMALL = {"steps": 2, "size": 2, "n": 2, "max_new_tokens": 4, "eval_every": 1, "eval_prompts": 4}
CONFIGS = {"grpo": GRPOConfig, "ppo": PPOConfig, "dapo": DAPOConfig, "areal": AREALConfig}
MORE = {"grpo": {}, "ppo": {"kl_coef": 0.1}, "dapo": {"overlong_soft": 2}, "areal": {}}
PARTS = {
    "grpo": "actor, rollout, reference, resharder",
    "ppo": "actor, rollout, reference, critic, resharder",
    "dapo": "actor, rollout, resharder",
    "areal": "actor, rollout, resharder",
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


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo"])
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


def trained_groups(monkeypatch):
    """Ids of the groups that actors train from now on, in order."""
    found, update = [], rk.ActorWorker.update

    def noting(self, batch, **options):
        found.extend(dict.fromkeys(batch.meta["group_ids"].tolist()))
        return update(self, batch, **options)

    monkeypatch.setattr(rk.ActorWorker, "update", noting)
    return found


def test_an_asynchronous_run_gone_on_trains_every_group_once(tmp_path, monkeypatch):
    found = trained_groups(monkeypatch)
    config = {"save_every": 1, "size": 3}
    for steps in (2, 4, 4, 7):
        run = start("areal", config=config | {"steps": steps}, checkpoint=rk.Checkpointer(tmp_path))
        assert run.actor.version == steps
        assert not run.rollout._transport.worker.engine.uids
    assert [record["step"] for record in run.log.records] == list(range(7))
    assert len(found) == len(set(found)) == 21
    assert max(found) - min(found) < 21 + 3 * 5  # the start of the stream: none is left out


def test_an_asynchronous_run_without_staleness_trains_on_its_own_policy(cluster):
    run = start("areal", cluster, config={"max_staleness": 0, "steps": 3})
    assert all(record["staleness/head_steps"] == 0 for record in run.log.records)
    assert run.log.records[-1]["policy/behaviour_weight_max"] == pytest.approx(1, abs=1e-3)


@each_recipe
def test_the_distance_of_engine_and_trainer_is_logged(runs, recipe):
    most = 1 if recipe == "areal" else 1e-4  # staleness is in it, too
    for record in runs[recipe].log.records:
        assert 0 <= record["mismatch/logprob_mean"] <= record["mismatch/logprob_max"] < most
        assert sum(record[name] for name in rk.algo.RATIO_BINS) == pytest.approx(1)


class Off(rk.TorchEngine):
    """An engine that says every token was half as likely as the trainer finds."""

    def step(self, **options):
        return [
            dataclasses.replace(response, logprobs=response.logprobs - math.log(2))
            for response in super().step(**options)
        ]


@each_recipe
@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        (functools.partial(rk.algo.truncated_importance_weight, cap=1.5), 1.5),
        (functools.partial(rk.algo.truncated_importance_weight, cap=3), 2),
        (functools.partial(rk.algo.masked_importance_weight, high=1.5), 0),
    ],
)
def test_an_importance_weight_is_one_argument_of_the_config(cluster, recipe, correction, weight):
    run = start(recipe, cluster, config={"engine": Off, "correction": correction, "steps": 1})
    record = run.log.records[0]
    assert record["mismatch/logprob_mean"] == pytest.approx(math.log(2), rel=1e-3)
    assert record["policy/behaviour_weight_mean"] == pytest.approx(weight, rel=1e-3)
    learns = weight > 0 and record.get("group/signal_fraction", 1) > 0
    assert (record["actor/grad_norm"] > 1e-3) == learns


@pytest.mark.parametrize(("config", "weight"), [({}, 2.0), ({"correction": None}, None)])
def test_an_asynchronous_run_weighs_stale_tokens_unless_told_not_to(cluster, config, weight):
    run = start("areal", cluster, config={"engine": Off, "steps": 1} | config)
    found = run.log.records[0].get("policy/behaviour_weight_mean")
    assert found == (weight and pytest.approx(weight, rel=1e-3))


def test_a_run_gone_on_with_another_importance_weight_says_so_once(tmp_path, caplog):
    for steps, cap in ((1, 2), (2, 2), (3, 3)):
        weight = functools.partial(rk.algo.truncated_importance_weight, cap=cap)
        config = {"correction": weight, "steps": steps}
        start("grpo", config=config, checkpoint=rk.Checkpointer(tmp_path))
    (said,) = caplog.messages
    assert "correction=" in said


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


@each_recipe
def test_an_error_in_a_step_has_the_run_so_far(recipe):
    def stop(log):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        start(recipe, on_step=stop)
    run = caught.value.run
    assert (len(run.log), run.actor.version) == (1, 1)
    assert "run = sys.last_value.run" in caught.value.__notes__[0]


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


FAILED = {"timeout": rk.rewards.Verdict(math.nan, "timeout"), "nan": math.nan, "inf": math.inf}


@pytest.mark.parametrize("value", FAILED.values(), ids=FAILED)
def test_ppo_skips_a_step_without_a_reward(cluster, value, tmp_path):
    reward = lambda prompt, response, answer: value
    run = start("ppo", cluster, reward_fn=reward, checkpoint=rk.Checkpointer(tmp_path))
    for record in run.log.records:
        assert record["actor/skipped_steps"] == record["critic/skipped_steps"] == 2
        assert record["group/num_failed_rewards"] == 4
        assert math.isnan(record["reward"])
    assert run.actor.version == 0


def test_ppo_trains_on_one_reward_that_is_left(cluster):
    first, _ = make_task().item(0)
    reward = lambda prompt, response, answer: 1.0 if prompt == first else math.nan
    config = {"steps": 1, "size": 4, "n": 1, "kl_coef": 0.0}
    (record,) = start("ppo", cluster, config=config, reward_fn=reward).log.records
    assert record["actor/skipped_steps"] == record["critic/skipped_steps"] == 1
    assert record["reward"] == record["actor/version"] == 1


@each_recipe
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": -1}, "steps: got -1, need at least 0"),
        ({"size": 0}, "size: got 0, need at least 1"),
        ({"n": 1.5}, "n: got 1.5, need at least 1"),
        ({"lr": math.nan}, "lr: got nan, need a finite number"),
        ({"lr": "1e-3"}, "lr: got '1e-3', need a finite number"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"clip_low": math.nan}, "clip_low, clip_high: got nan"),
        ({"size": 2, "minibatches": 3}, "minibatches: got 3, need at most size=2"),
        ({"save_every": -1}, "save_every: got -1, need at least 0"),
        ({"correction": 2.0}, "correction: got 2.0, need a function of .old_logprobs, rollout_log"),
    ],
)
def test_numbers_that_make_no_run_are_an_error_at_once(recipe, wrong, says):
    with pytest.raises((ValueError, TypeError), match=says):
        CONFIGS[recipe](**wrong)


@pytest.mark.parametrize(
    ("cls", "wrong", "says"),
    [
        (GRPOConfig, {"kl_coef": math.nan}, "GRPOConfig.kl_coef: got nan, need a finite number"),
        (GRPOConfig, {"n": 1}, "GRPOConfig.n: got 1, need at least 2 responses a prompt"),
        (PPOConfig, {"kl_coef": math.nan}, "PPOConfig.kl_coef: got nan, need a finite number"),
        (PPOConfig, {"critic_lr": math.inf}, "critic_lr: got inf, need a finite number"),
        (PPOConfig, {"lam": 7}, "PPOConfig.lam: got 7, need a finite .* least 0 and at most 1"),
        (PPOConfig, {"gamma": -1}, "PPOConfig.gamma: got -1, need .* least 0 and at most 1"),
        (PPOConfig, {"value_clip": math.nan}, "value_clip: got nan, need a number above 0"),
        (AREALConfig, {"max_staleness": -1}, "AREALConfig.max_staleness: got -1, need at least 0"),
        (AREALConfig, {"max_age": -1}, "AREALConfig.max_age: got -1, need at least 0"),
        (DAPOConfig, {"n": 1}, "DAPOConfig.n: got 1, need at least 2 responses a prompt"),
        (DAPOConfig, {"max_rounds": 0}, "max_rounds: got 0, need at least 1 round"),
        (DAPOConfig, {"max_new_tokens": 8, "overlong_soft": 8}, "got 8, .* less than max_new_tok"),
    ],
)
def test_numbers_of_one_recipe_are_checked_at_once(cls, wrong, says):
    with pytest.raises(ValueError, match=says):
        cls(**wrong)


def test_the_overlong_penalty_begins_at_three_quarters(cluster):
    run = start("dapo", cluster, config={"steps": 1, "overlong_soft": None})
    assert run.log.records[0]["reward"] <= 0.5  # of two responses one is right, both too long


def test_a_run_without_saves_saves_its_last_step(cluster, tmp_path):
    start("grpo", cluster, config={"save_every": 0})
    checkpoint = rk.Checkpointer(tmp_path)
    start("grpo", cluster, config={"save_every": 0}, checkpoint=checkpoint)
    assert checkpoint.frame()["step"].tolist() == [1]


@each_recipe
def test_a_checkpoint_is_a_checkpointer(cluster, recipe):
    with pytest.raises(TypeError, match=r"got 'runs' as the checkpoint, need .*Checkpointer\("):
        start(recipe, cluster, checkpoint="runs")


def test_going_on_with_other_numbers_is_said(cluster, tmp_path, caplog):
    def run(recipe="grpo", **config):
        caplog.clear()
        start(recipe, cluster, config=config, checkpoint=rk.Checkpointer(tmp_path))
        return " ".join(r.message for r in caplog.records if r.name == "rlkit.recipes")

    assert run() == ""
    assert run(steps=3, eval_every=2, save_every=1) == ""
    assert "goes on with other numbers: size=3 (was 2)" in run(steps=4, size=3)
    assert "config=DAPOConfig (was GRPOConfig)" in run("dapo", steps=4, size=3)


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
@pytest.mark.parametrize(("recipe", "steps"), [("ppo", 60), ("dapo", 30), ("areal", 40)])
def test_reverse_digits_is_learnt(recipe, steps):
    task, model = rk.tasks.reverse_digits(length=6), rk.models.tiny(pretrained="reverse_digits")
    config = CONFIGS[recipe](steps=steps, eval_every=steps)
    run = getattr(rk.recipes, recipe)(rk.launch(backend="local"), model, task, config)
    assert run.log.records[-1]["eval/accuracy"] >= 0.9
