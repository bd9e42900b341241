"""README tables are made from results.csv; every number has a unit and a source."""

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pandas as pd
import pytest

from rlkit import experiment
from rlkit.record import RunRecord

FOLDERS = sorted((Path(__file__).resolve().parent.parent / "experiments").glob("[0-9]*_*"))


def load(folder):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # for modules beside run.py, as Python does for a script
    spec = importlib.util.spec_from_file_location(f"experiment_{folder.name}", folder / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(**changes):
    row = dict.fromkeys(experiment.COLUMNS, "x") | {"unit": "s", "source": "measured"} | changes
    return pd.DataFrame([row])


def test_there_are_experiments():
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_readme_table_is_made_from_the_results(folder):
    assert experiment.get_table(folder) == load(folder).table(pd.read_csv(folder / "results.csv"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_every_result_has_a_unit_and_a_source(folder):
    experiment.check_results(pd.read_csv(folder / "results.csv"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_every_experiment_has_a_record_of_its_run(folder):
    text = (folder / experiment.RECORD).read_text()
    record = json.loads(text)
    assert list(record) == [item.name for item in fields(RunRecord)]
    assert record["started"] < record["ended"]
    assert record["config"]
    assert {"rlkit", "torch", "ray", "numpy"} <= record["packages"].keys()
    results = pd.read_csv(folder / "results.csv", dtype={"commit": str})  # 1e10 is no number
    assert sorted(results["seed"].unique()) == sorted(record["seeds"])
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"])
    assert results["commit"].str.fullmatch(r"[0-9a-f]{7,40}\+?").all()
    (commit,) = results["commit"].unique()
    assert record["commit"].startswith(commit.removesuffix("+"))
    assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|usr|Users|opt|var)/", text)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_script_is_short(folder):
    assert len((folder / "run.py").read_text().splitlines()) <= 80


def test_a_row_without_a_unit_is_refused():
    with pytest.raises(ValueError, match="'x' has no unit"):
        experiment.check_results(rows(unit=None))


def test_a_row_without_a_known_source_is_refused():
    with pytest.raises(ValueError, match=r"got sources \['guessed'\]"):
        experiment.check_results(rows(source="guessed"))


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"columns \['commit'\] are missing"):
        experiment.check_results(rows().drop(columns="commit"))


def test_results_and_record_are_written_side_by_side(tmp_path):
    record = RunRecord.collect(config={}, seeds=[0]).finished()
    path = experiment.write_results(rows(), tmp_path / "deep", record=record)
    assert sorted(p.name for p in path.parent.iterdir()) == ["record.json", "results.csv"]


def test_an_unknown_key_of_a_config_is_named(tmp_path):
    from rlkit.recipes import GRPOConfig

    (tmp_path / "config.toml").write_text("[grpo]\nstep = 3\n")
    with pytest.raises(ValueError, match=r"got unknown keys \['step'\]"):
        experiment.read_config(tmp_path, {"grpo": GRPOConfig})


def test_quickstart_rewards_climb_for_five_of_five_seeds():
    """Of the committed results: the mean reward of each seed's last five steps is 0.9 or more."""
    folder = next(f for f in FOLDERS if f.name == "010_grpo_quickstart")
    results = pd.read_csv(folder / "results.csv")
    reward = results[results["metric"] == "reward"]
    last = reward[reward["step"] >= 95].groupby("seed")["value"].mean()
    first = reward[reward["step"] == 0].groupby("seed")["value"].mean()
    assert len(last) == 5
    assert (last >= 0.9).all()
    assert first.between(0.1, 0.25).all()


@pytest.mark.parametrize(("name", "staleness"), [("2", [0, 1, 2, 2]), ("unbounded", [0, 0, 1, 1])])
def test_samples_are_as_stale_as_the_lag_imposed(name, staleness):
    from rlkit.recipes import GRPOConfig

    lag = load(next(f for f in FOLDERS if f.name == "060_staleness")).lag
    config = GRPOConfig(steps=4, size=2, n=2, eval_every=4, eval_prompts=2)
    frame = lag.run("decoupled", name, 0, config, {})
    found = frame[frame["metric"] == "staleness/token_mean_steps"]["value"]
    assert found.tolist() == staleness
    assert (frame[frame["metric"] == "proximal/rollout_error"]["value"].iloc[0]) < 1e-4
