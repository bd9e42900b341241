"""Several rewards: sum, columns, outcomes, metrics."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rlkit as rk
from rlkit.algo import exact_match, group_relative, has_signal
from rlkit.rewards import Verdict, combine, reward_metrics


def short(prompt, response, answer):
    return -len(response) / 10


def fails(prompt, response, answer):
    return {"slow": Verdict(math.nan, "timeout"), "bad": Verdict(math.nan, "error")}.get(
        response, 1.0
    )


def make_batch(*responses, answer="7"):
    rows = len(responses)
    columns = {"prompt": ["p"] * rows, "response": list(responses), "answer": [answer] * rows}
    return rk.Batch.from_columns(columns | {"group_ids": [0] * rows})


def scored(parts, *responses):
    batch = make_batch(*responses)
    batch["rewards"] = rk.score(combine(parts), batch)
    return batch


def test_rewards_are_the_weighted_sum_and_parts_are_columns():
    batch = scored({"right": (exact_match, 2.0), "short": (short, 0.5)}, "7", "12345")
    assert batch["rewards"].tolist() == pytest.approx([2 - 0.05, -0.25])
    assert batch["reward/right"].tolist() == [1, 0]
    assert batch["reward/short"].tolist() == pytest.approx([-0.1, -0.5])
    assert batch["outcomes"] == ["ok", "ok"]


def test_a_combined_reward_is_a_reward_function():
    fn = combine({"right": (exact_match, 2.0), "short": (short, 0.5)})
    assert fn("p", "7", "7") == pytest.approx(1.95)
    assert repr(fn) == "Combined(2 right + 0.5 short)"
    outer = combine({"both": (fn, 1.0), "right": (exact_match, 1.0)})
    assert outer("p", "7", "7") == pytest.approx(2.95)


def test_each_part_is_judged_once(tmp_path):
    def counted(prompt, response, answer):
        with (tmp_path / "calls").open("a") as file:
            file.write(response)
        return 1.0

    scored({"one": (counted, 1.0), "two": (short, 1.0)}, "a", "b")
    assert (tmp_path / "calls").read_text() == "ab"


def test_a_part_without_weight_is_logged_and_not_in_the_sum():
    batch = scored({"right": (exact_match, 1.0), "watched": (fails, 0.0)}, "7", "slow")
    assert batch["rewards"].tolist() == [1, 0]
    assert batch["reward/watched"].isnan().tolist() == [False, True]
    assert batch["outcomes"] == ["ok", "ok"]


@pytest.mark.parametrize("values", [(math.inf, -math.inf), (1e308, 1e308), (math.nan, 1.0)])
def test_a_sum_that_is_not_finite_is_nan_and_an_error(values):
    one, other = values
    parts = {"i": (lambda p, r, a: one, 1.0), "j": (lambda p, r, a: other, 1.0)}
    batch = scored(parts, "7")
    assert batch["rewards"].isnan().all()
    assert batch["outcomes"] == ["error"]
    assert math.isnan(combine(parts)("p", "7", "7"))


def test_scoring_again_leaves_nothing_of_the_parts_before():
    batch = scored({"right": (exact_match, 1.0), "short": (short, 0.5)}, "7", "12345")
    batch["rewards"] = rk.score(combine({"short": (short, 1.0)}), batch)
    assert {name for name in batch.columns if "/" in name} == {"reward/short"}
    batch["accuracy"] = rk.score(exact_match, batch)
    assert "reward/short" in batch  # they are still the rewards' parts
    batch["rewards"] = rk.score(exact_match, batch)
    assert set(reward_metrics(batch)) == {"reward", "group/num_failed_rewards"}
    assert "outcomes" not in batch


def test_arguments_bound_to_the_sum_are_an_error():
    fn = partial(combine({"right": (exact_match, 1.0)}))
    with pytest.raises(TypeError, match="parts would be lost, need the reward of combine"):
        rk.score(fn, make_batch("7"))


def test_parts_may_be_scalars_of_torch():
    fn = combine({"one": (lambda p, r, a: torch.tensor(1.0), 0.5)})
    assert fn("p", "7", "7") == 0.5


def test_a_failed_part_is_nan_counted_and_named_apart():  # faults I2, A4
    parts = {"checked": (fails, 1.0), "short": (short, 1.0)}
    batch = scored(parts, "slow", "bad", "good", "right!")
    assert batch["rewards"].isnan().tolist() == [True, True, False, False]
    assert batch["outcomes"] == ["timeout", "error", "ok", "ok"]
    metrics = reward_metrics(batch)
    assert metrics == {
        "reward": pytest.approx((0.6 + 0.4) / 2),
        "reward/checked_mean": 1.0,
        "reward/short_mean": pytest.approx(-(0.4 + 0.3 + 0.4 + 0.6) / 4),
        "group/num_failed_rewards": 2,
        "reward/num_timeouts": 1,
        "reward/num_errors": 1,
    }
    advantages = group_relative(batch["rewards"], batch["group_ids"])
    assert advantages.tolist()[:2] == [0, 0]
    assert advantages.isfinite().all()
    assert advantages.sum() == pytest.approx(0, abs=1e-6)


def test_the_filter_looks_at_the_outcome_not_at_the_shaped_sum():  # faults A11
    batch = scored({"right": (exact_match, 1.0), "short": (short, 1.0)}, "1", "22", "333", "4444")
    assert has_signal(batch["rewards"], batch["group_ids"]).all()
    assert not has_signal(batch["reward/right"], batch["group_ids"]).any()


def test_metrics_of_a_single_reward_leave_nan_out():  # faults A4
    batch = make_batch("a", "b", "c")
    batch["rewards"] = torch.tensor([math.nan, 1.0, 0.0])
    assert reward_metrics(batch) == {"reward": 0.5, "group/num_failed_rewards": 1}


def test_metrics_without_one_valid_reward_are_nan():
    batch = make_batch("a")
    batch["rewards"] = torch.tensor([math.nan])
    assert math.isnan(reward_metrics(batch)["reward"])


def test_the_log_shows_the_mean_of_each_part():
    batch = scored({"right": (exact_match, 1.0), "short": (short, 0.1)}, "7", "8")
    log = rk.MetricLog()
    log.add(0, reward_metrics(batch))
    means = log.frame().loc[0, ["reward/right_mean", "reward/short_mean"]].tolist()
    assert means == pytest.approx([0.5, -0.1])


def test_the_recipe_logs_the_mean_of_each_part():
    task = rk.tasks.reverse_digits(length=2)
    config = rk.recipes.GRPOConfig(steps=1, size=2, n=2, max_new_tokens=4, eval_every=0)
    parts = {"right": (task.verify, 1.0), "short": (short, 0.1)}
    with rk.launch(backend="local") as cluster:
        run = rk.recipes.grpo(cluster, rk.models.tiny(), task, config, reward_fn=combine(parts))
    row = run.log.frame().iloc[0]
    expected = row["reward/right_mean"] + 0.1 * row["reward/short_mean"]
    assert row["reward"] == pytest.approx(expected, abs=1e-6)
    assert (row["reward/num_timeouts"], row["reward/num_errors"]) == (0, 0)


def test_an_error_of_a_part_names_part_and_row():
    parts = {"right": (lambda prompt, response, answer: 1 / (response != "b"), 1.0)}
    with pytest.raises(ZeroDivisionError) as caught:
        scored(parts, "a", "b")
    assert "function of part 'right' failed on row 1" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="got str of part 'right' on row 0"):
        scored({"right": (lambda prompt, response, answer: "1", 1.0)}, "a")


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ({}, ValueError, "need a part with a weight other than 0"),
        ({"right": (exact_match, 0.0)}, ValueError, "need a part with a weight other than 0"),
        ({"right": exact_match}, TypeError, r"right: got .*, need \(reward_fn, weight\)"),
        ({"right": (exact_match, "1")}, TypeError, "a finite number"),
        ({"right": (exact_match, [1.0])}, TypeError, "a finite number"),
        ([("right", exact_match)], TypeError, "combine: got .* need a dict"),
        ({"right": (exact_match, math.nan)}, TypeError, "a finite number"),
        ({"right": ("exact", 1.0)}, TypeError, "a function of prompt, response"),
    ],
)
def test_wrong_parts_are_an_error(parts, error, message):
    with pytest.raises(error, match=message):
        combine(parts)


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=5))
def test_the_sum_does_not_depend_on_the_order_of_parts(pairs):
    parts = {
        str(i): ((lambda p, r, a, value=value: value), weight or 1.0)
        for i, (value, weight) in enumerate(pairs)
    }
    found = combine(parts)("", "", "")
    assert found == combine(dict(reversed(parts.items())))("", "", "")
    assert found == pytest.approx(sum(weight * fn("", "", "") for fn, weight in parts.values()))
