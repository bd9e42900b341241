import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy
import pytest
import torch

from rlkit import record
from rlkit.functions import source_of
from rlkit.metrics import MetricLog, StepMetrics
from rlkit.recipes import GRPOConfig
from rlkit.record import RunRecord, commit, plain


@dataclass
class Settings:
    rate: float = 0.5
    folder: Path = Path("/home/someone/data/run")


def loss(logprobs, batch):
    return batch.token_mean(-logprobs), {}


def collect(**config):
    return RunRecord.collect(config=config, seeds=[0, 1])


# ---- what it holds ----


def test_configurations_are_plain_values():
    assert collect(grpo=GRPOConfig(steps=3), n=2).config["grpo"]["steps"] == 3
    assert RunRecord.collect(config=GRPOConfig(steps=3), seeds=0).config["steps"] == 3


def test_versions_are_those_of_the_packages_that_run():
    packages = collect().packages
    assert torch.__version__.startswith(packages["torch"])  # of PyPI without its +cu128
    assert packages["numpy"] == numpy.__version__
    assert {"rlkit", "ray", "pandas"} <= packages.keys()
    assert "pytest" not in packages


def test_machine_and_devices_are_named_by_kind():
    found = collect()
    assert found.python == platform.python_version()
    assert found.cpu
    assert found.devices["cpu"] == os.cpu_count()


def test_losses_come_from_the_logs_sources():
    source = source_of(loss)
    log = MetricLog()
    log.add(0, StepMetrics(same={"actor/loss_hash": source.hash}, sources={source.hash: source}))
    (found,) = collect().finished(log.sources).losses
    assert found["name"] == "loss"
    assert found["hash"] == log.records[0]["actor/loss_hash"]
    assert (
        found["source"]
        == "def loss(logprobs, batch):\n    return batch.token_mean(-logprobs), {}\n"
    )


def test_a_run_ends_after_it_began():
    found = collect()
    assert found.ended == ""
    found = found.finished()
    start, end = map(datetime.fromisoformat, (found.started, found.ended))
    assert start.utcoffset().total_seconds() == 0
    assert start <= end


def test_the_commit_is_the_checkouts():
    git = ["git", "-C", str(Path(record.__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = collect()
    assert found.commit == (head or "unknown")
    assert commit() == "unknown" or found.commit.startswith(commit().removesuffix("+"))
    assert commit().endswith("+") == found.dirty


def test_a_package_in_someone_elses_checkout_has_no_commit(tmp_path, monkeypatch):
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(record, "_root", lambda: tmp_path)
    assert collect().commit == "unknown"
    assert commit() == "unknown"


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert collect().commit == "unknown"


# ---- what it does not hold ----


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/home/someone/data/run.csv", "run.csv"),
        ("/data", "data"),
        ("--out=/home/someone/run", "--out=run"),
        ("~/runs/7", "7"),
        (r"C:\Users\someone\run.csv", "run.csv"),
        ("see '/home/someone/x.txt', it is there", "see 'x.txt', it is there"),
        ("experiments/010/run.py", "experiments/010/run.py"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("ratio = a / b / c", "ratio = a / b / c"),
        ("tokens_per_s = 1/2/3", "tokens_per_s = 1/2/3"),
        (r"re.split('\n\n|\s+')", r"re.split('\n\n|\s+')"),
    ],
)
def test_of_absolute_paths_the_last_name_is_left(text, clean):
    assert plain(text) == clean


def test_paths_inside_the_checkout_stay_relative_to_it(monkeypatch):
    script = Path(record.__file__).resolve().parent.parent / "experiments" / "run.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--out", "/home/someone/x"])
    assert collect().command == ["experiments/run.py", "--out", "x"]


def test_it_names_neither_host_nor_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr(platform, "node", lambda: "host-of-someone")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "run.py")])
    text = json.dumps(collect(settings=Settings()).finished().to_dict())
    assert "someone" not in text
    assert str(tmp_path) not in text
    assert not re.search(r'"[^"]*/(home|root|tmp|Users)/', text)


# ---- plain values ----


def test_values_become_what_json_has():
    assert plain(Settings()) == {"rate": 0.5, "folder": "run"}
    assert plain({1: (1, None, True), "x": {2.5}}) == {"1": [1, None, True], "x": [2.5]}
    assert plain([float("inf"), float("nan")]) == ["inf", "nan"]
    assert plain(Settings) == "Settings"


def test_a_function_is_its_name_and_the_hash_of_its_code():
    assert plain(loss) == {"function": "loss", "hash": source_of(loss).hash}


def test_a_setting_that_is_no_plain_value_is_named():
    with pytest.raises(TypeError, match=r"config\.a\.b\[1\]: got object, need numbers, text"):
        collect(a={"b": [1, object()]})


def test_a_config_that_names_nothing_is_refused():
    with pytest.raises(TypeError, match="config: got int, need a dataclass or a dict"):
        RunRecord.collect(config=3, seeds=0)


# ---- the file ----


def test_what_is_written_reads_back_and_leaves_no_other_file(tmp_path):
    found = collect(n=2).finished()
    path = found.write(tmp_path / "deep" / "record.json")
    assert json.loads(path.read_text()) == json.loads(json.dumps(found.to_dict()))
    assert list(path.parent.iterdir()) == [path]
