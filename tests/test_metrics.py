import ast
import copy
import math
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import rlkit
import rlkit as rk
from rlkit.backends import TorchBackend
from rlkit.functions import Source
from rlkit.glossary import GLOSSARY, unit_of
from rlkit.metrics import (
    STAGES,
    MetricLog,
    StepMetrics,
    reduce_metrics,
    timer,
    tokens_per_s_per_device,
)
from rlkit.models import tiny
from rlkit.trace import Span, Trace, current

SOURCE = Source("loss", "def loss(): ...", "0123456789ab")


def make_log(*spans: Span) -> tuple[MetricLog, Trace]:
    trace = Trace()
    log = MetricLog(trace=trace)
    for span in spans:
        trace.add(span)
    return log, trace


def span(stage, start_s=0.0, end_s=1.0, **facts) -> Span:
    return Span(stage=stage, start_s=start_s, end_s=end_s, **facts)


# ---- the log ----


def test_a_record_holds_numbers_tensors_and_words_as_plain_values():
    log, _ = make_log()
    log.add(0, {"a": torch.tensor(0.5), "b": np.float32(2), "c": True}, d=3, e="word")
    record = log.records[0]
    assert {k: record[k] for k in "abcde"} == {"a": 0.5, "b": 2.0, "c": True, "d": 3, "e": "word"}
    assert type(record["a"]) is float
    assert type(record["b"]) is float


def test_values_by_name_join_the_metrics():
    log, _ = make_log()
    log.add(0, {"reward": 1.0, "x": 1.0}, reward=2.0)
    assert (log.records[0]["reward"], log.records[0]["x"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    "value", [None, [1.0], {"a": 1}, torch.ones(2), np.ones(1), torch.ones(1, 1), object()]
)
def test_a_value_that_is_no_number_is_a_type_error_that_names_it(value):
    log, _ = make_log()
    with pytest.raises(TypeError, match=f"reward: got {type(value).__name__} .*need a number"):
        log.add(0, reward=value)
    assert not log.records


@pytest.mark.parametrize("step", ["0", 1.0, True, None])
def test_a_step_that_is_no_int_is_a_type_error(step):
    log, _ = make_log()
    with pytest.raises(TypeError, match=f"step: got {type(step).__name__}, need an int"):
        log.add(step)


def test_a_frame_has_a_row_a_record():
    log, _ = make_log()
    log.add(0, reward=0.5)
    log.add(1, reward=0.75, extra=1.0)
    frame = log.frame()
    assert frame["reward"].tolist() == [0.5, 0.75]
    assert math.isnan(frame["extra"][0])
    assert list(frame.columns)[:2] == ["step", "reward"]


def test_an_empty_log_has_a_frame_with_a_step_column():
    log, _ = make_log()
    assert list(log.frame().columns) == ["step"]
    assert len(log.frame()) == len(log) == 0


def test_tidy_has_a_row_a_number_with_its_unit_and_the_facts():
    log, _ = make_log()
    log.add(3, {"policy/kl_ref": 0.1, "actor/loss_hash": "abc"})
    tidy = log.tidy(run="a", source="measured")
    row = tidy[tidy["metric"] == "policy/kl_ref"].iloc[0].to_dict()
    assert row == {
        "run": "a",
        "source": "measured",
        "step": 3,
        "metric": "policy/kl_ref",
        "value": 0.1,
        "unit": "nats",
    }
    assert not {"step", "actor/loss_hash"} & set(tidy["metric"])


def test_sources_of_losses_are_kept_by_hash():
    log, _ = make_log()
    log.add(0, StepMetrics({"x": 1.0}, sources={SOURCE.hash: SOURCE}))
    assert log.sources == {SOURCE.hash: SOURCE}


def test_repr_counts_records():
    log, _ = make_log()
    assert repr(log) == "MetricLog(0 records)"
    log.add(7)
    assert repr(log) == "MetricLog(1 records, last step 7)"


# ---- listeners ----


def test_a_listener_is_called_after_each_record_until_it_is_stopped():
    log, _ = make_log()
    seen = []
    stop = log.listen(lambda log: seen.append(len(log)))
    log.add(0)
    log.add(1)
    stop()
    stop()
    log.add(2)
    assert seen == [1, 2]


def test_a_listener_may_stop_itself():
    log, _ = make_log()
    seen, stops = [], []

    def once(log):
        seen.append(len(log))
        stops[0]()

    stops.append(log.listen(once))
    log.listen(lambda log: seen.append(-len(log)))
    log.add(0)
    log.add(1)
    assert seen == [1, -1, -2]


def test_a_frame_can_be_read_while_records_are_added():
    log, _ = make_log()
    adding = threading.Thread(target=lambda: [log.add(i, x=float(i)) for i in range(300)])
    adding.start()
    while adding.is_alive():
        frame = log.frame()
        assert frame["step"].tolist() == list(range(len(frame)))
    adding.join()
    assert len(log) == 300


# ---- seconds and throughput ----


def test_seconds_of_the_stages_come_from_the_trace():
    log, _ = make_log(span("generate", 0, 2), span("update", 3, 4), span("update", 4, 7))
    log.add(0)
    record = log.records[0]
    assert (record["time/generate_s"], record["time/update_s"]) == (2.0, 4.0)


def test_ranks_of_one_call_count_once():
    log, _ = make_log(span("generate", 0, 2, call=1), span("generate", 1, 4, call=1))
    log.add(0)
    assert log.records[0]["time/generate_s"] == 4.0


def test_a_record_has_the_spans_since_the_one_before():
    log, trace = make_log(span("generate", 0, 2))
    log.add(0)
    trace.add(span("generate", 0, 3))
    log.add(1)
    assert [record["time/generate_s"] for record in log.records] == [2.0, 3.0]


def test_spans_before_the_log_or_before_start_are_not_counted():
    trace = Trace()
    trace.add(span("generate"))
    log = MetricLog(trace=trace)
    trace.add(span("score"))
    log.start()
    log.add(0)
    assert not {"time/generate_s", "time/score_s"} & log.records[0].keys()


def test_stages_and_other_make_the_step():
    log, trace = make_log()
    with trace.span("generate"):
        threading.Event().wait(0.02)
    threading.Event().wait(0.02)
    log.add(0)
    record = log.records[0]
    stages = record["time/generate_s"] + record["time/other_s"]
    assert stages == pytest.approx(record["time/step_s"])
    assert record["time/generate_s"] >= 0.02
    assert record["time/other_s"] >= 0.02


def test_a_stage_that_failed_and_ran_again_is_no_other_time():
    class Worker:
        calls = 0

        def work(self):
            threading.Event().wait(0.05)
            Worker.calls += 1
            if Worker.calls == 1:
                raise RuntimeError("once")

    Worker.work.__rlkit_stage__ = "generate"
    group, log = rk.launch(backend="local").spawn(Worker), MetricLog()
    with pytest.raises(RuntimeError, match="once"):
        group.work()
    group.work()
    log.add(0)
    record = log.records[0]
    assert record["time/generate_s"] >= 0.1
    assert record["time/generate_s"] + record["time/other_s"] == pytest.approx(
        record["time/step_s"]
    )


def test_other_is_not_negative_when_stages_overlap():
    log, _ = make_log(span("generate", 0, 1e6))
    log.add(0)
    assert log.records[0]["time/other_s"] == 0


def test_a_stage_of_the_users_has_no_column():
    log, _ = make_log(span("my_stage"))
    log.add(0)
    assert "time/my_stage_s" not in log.records[0]


def test_throughput_is_trained_tokens_by_seconds_and_devices():
    log, _ = make_log(
        span("generate", tokens=9999, devices=8),
        span("update", tokens=300, devices=8, call=1),
        span("update", tokens=500, devices=8, call=1),
    )
    log.add(0)
    record = log.records[0]
    assert record["throughput/tokens_per_s"] == pytest.approx(800 / record["time/step_s"])
    assert record["throughput/tokens_per_s_per_device"] == pytest.approx(
        800 / 8 / record["time/step_s"]
    )


def test_a_step_without_training_has_no_throughput():
    log, _ = make_log(span("generate", tokens=10))
    log.add(0)
    assert not [name for name in log.records[0] if name.startswith("throughput/")]


def test_a_value_given_by_hand_stays():
    log, _ = make_log(span("generate", 0, 2))
    log.add(0, {"time/generate_s": 5.0})
    assert log.records[0]["time/generate_s"] == 5.0


def test_throughput_by_hand():
    assert tokens_per_s_per_device(1200, seconds=3.0, devices=4) == 100.0


@pytest.mark.parametrize(("seconds", "devices"), [(0, 1), (-1, 1), (1, 0)])
def test_throughput_of_no_time_or_no_device_is_an_error(seconds, devices):
    with pytest.raises(ValueError, match="need more than 0 seconds and at least 1 device"):
        tokens_per_s_per_device(1, seconds=seconds, devices=devices)


def test_timer_records_a_span_of_this_process():
    mark = current().mark()
    with timer("score", rows=2):
        pass
    assert [(s.stage, s.rows) for s in current().since(mark)] == [("score", 2)]


# ---- the metrics of one call ----


def test_shares_of_ranks_add_up():  # faults B14: sums 4 and 4 over counts 1 and 3
    ranks = [StepMetrics({"loss": 4.0 / 4}), StepMetrics({"loss": 4.0 / 4})]
    assert StepMetrics.merge(ranks) == {"loss": 2.0}


def test_a_loss_keeps_its_sign():  # faults B14
    assert StepMetrics.merge([StepMetrics({"loss": -0.25})] * 2) == {"loss": -0.5}


def test_maxima_and_minima_of_ranks_stay_such():
    ranks = [StepMetrics({"a_max": 1.0, "b_min": 1.0}), StepMetrics({"a_max": 3.0, "b_min": 3.0})]
    assert StepMetrics.merge(ranks) == {"a_max": 3.0, "b_min": 1.0}


def test_a_share_that_one_rank_lacks_is_the_sum_of_the_others():
    assert StepMetrics.merge([StepMetrics({}), StepMetrics({"x": 2.0})]) == {"x": 2.0}


def test_what_ranks_agree_on_is_not_added():
    ranks = [StepMetrics({}, same={"actor/version": 3, "actor/loss_hash": "ab"})] * 2
    assert StepMetrics.merge(ranks) == {"actor/version": 3, "actor/loss_hash": "ab"}


@pytest.mark.parametrize(
    ("name", "expected"), [("x", 6.0), ("x_max", 3.0), ("x_min", 1.0), ("max_x", 6.0)]
)
def test_the_ending_of_a_name_says_how_parts_become_one(name, expected):
    assert reduce_metrics([{name: value} for value in (1.0, 3.0, 2.0)]) == {name: expected}


@pytest.mark.parametrize("again", [lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_metrics_travel_with_all_they_have(again):
    metrics = StepMetrics({"x": 1.0}, same={"v": 2}, sources={SOURCE.hash: SOURCE})
    metrics["added"] = 3.0
    metrics |= {"reward": 4.0}
    found = again(metrics)
    assert found == metrics == {"x": 1.0, "v": 2, "added": 3.0, "reward": 4.0}
    assert (found.shares, found.same, found.sources) == (
        metrics.shares,
        metrics.same,
        metrics.sources,
    )


def test_joining_keeps_the_sources():
    metrics = StepMetrics({"x": 1.0}, sources={SOURCE.hash: SOURCE})
    joined = metrics | {"reward": 1.0}
    assert joined == {"x": 1.0, "reward": 1.0}
    assert joined.sources == {SOURCE.hash: SOURCE}


def test_joining_from_the_left_keeps_the_sources():
    metrics = StepMetrics({"x": 1.0}, sources={SOURCE.hash: SOURCE})
    joined = {"reward": 1.0, "x": 0.0} | metrics
    assert joined == {"reward": 1.0, "x": 1.0}
    assert joined.sources == {SOURCE.hash: SOURCE}


def test_joining_in_place_keeps_the_sources_of_both():
    other = Source("b", "", "ba9876543210")
    metrics = StepMetrics({"x": 1.0}, sources={SOURCE.hash: SOURCE})
    metrics |= StepMetrics({"y": 2.0}, sources={other.hash: other})
    assert metrics == {"x": 1.0, "y": 2.0}
    assert metrics.sources == {SOURCE.hash: SOURCE, other.hash: other}


# ---- the glossary ----

METRIC = re.compile(r"[a-z_]+/[a-z_]+")
AREAS = {name.split("/")[0] for name in GLOSSARY if "/" in name}


def metric_names(path: Path) -> set[str]:
    """Literal strings of a file that look like a metric: ``area/name``, an area of the glossary."""
    values = (getattr(node, "value", None) for node in ast.walk(ast.parse(path.read_text())))
    found = {value for value in values if isinstance(value, str) and METRIC.fullmatch(value)}
    return {name for name in found if name.split("/")[0] in AREAS}


def test_every_metric_named_in_the_package_is_in_the_glossary():
    package = Path(rlkit.__file__).parent
    named = {name: str(p) for p in sorted(package.rglob("*.py")) for name in metric_names(p)}
    assert len(named) > 10
    assert not {name: path for name, path in named.items() if name not in GLOSSARY}


def test_every_metric_of_the_glossary_is_written_by_a_recipe_or_an_algorithm(tmp_path):
    small = {"steps": 2, "size": 2, "n": 4, "max_new_tokens": 3, "eval_every": 1, "save_every": 1}
    task, cluster, recipes = rk.tasks.sort(length=2), rk.launch(backend="local"), rk.recipes
    task.verify = lambda prompt, response, answer: float(len(set(response)))  # groups differ
    written = {"policy/entropy"}
    for recipe, config in [
        (recipes.grpo, recipes.GRPOConfig(**small)),
        (recipes.ppo, recipes.PPOConfig(**small, kl_coef=0.1)),
        (recipes.dapo, recipes.DAPOConfig(**small, overlong_soft=1)),
        (recipes.areal, recipes.AREALConfig(**small)),
    ]:
        checkpoint = rk.Checkpointer(tmp_path / recipe.__name__)
        log = recipe(cluster, tiny(), task, config, checkpoint=checkpoint).log
        written |= {name for record in log.records for name in record}
    package = Path(rlkit.__file__).parent
    writers = [
        p
        for room in ("algo", "rewards", "schedule", "sim", "tasks")
        for p in (package / room).rglob("*.py")
    ]
    assert GLOSSARY.keys() <= written.union(*map(metric_names, writers))


def test_what_an_optimizer_step_reports_is_in_the_glossary():
    names = TorchBackend(tiny()).step()
    assert not {f"actor/{name}" for name in names} - GLOSSARY.keys()


def test_every_entry_has_a_meaning():
    assert all(metric.name == name and metric.meaning for name, metric in GLOSSARY.items())


def test_stages_are_those_with_a_time_in_the_glossary():
    assert "generate" in STAGES
    assert not {"step", "other"} & set(STAGES)
    assert all(f"time/{stage}_s" in GLOSSARY for stage in STAGES)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("time/generate_s", "s"),
        ("throughput/tokens_per_s_per_device", "tokens/s/device"),
        ("policy/clip_fraction", "1"),
        ("mine/length_tokens", "tokens"),
        ("mine/peak_gib", "GiB"),
        ("mine/rows_per_s", "rows/s"),
        ("mine/wait_s", "s"),
        ("mine/staleness_steps", "steps"),
        ("mine/other", "1"),
    ],
)
def test_the_unit_of_a_metric_is_the_glossarys_or_that_of_its_ending(name, unit):
    assert unit_of(name) == unit


def test_every_unit_agrees_with_the_ending_of_its_name():
    for name, metric in GLOSSARY.items():
        for ending, unit in {"_s": "s", "_tokens": "tokens", "_gib": "GiB"}.items():
            if name.endswith(ending) and not name.endswith("_per_s"):
                assert metric.unit == unit, name
