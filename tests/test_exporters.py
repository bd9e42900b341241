"""Records of a log in TensorBoard's event files and in a run of Weights & Biases, read back."""

import subprocess
import sys

import pytest

from rlkit import exporters
from rlkit.exporters import Exporter
from rlkit.metrics import MetricLog


def logged(exporter, num=3):
    """A log of ``num`` records that the exporter listens to."""
    log = MetricLog()
    stop = log.listen(exporter)
    for step in range(num):
        log.add(step, {"reward": step / 8, "actor/loss_hash": f"hash{step}"})
    stop()
    return log


def event_file(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


# ---- the contract ----


def test_any_function_of_the_log_is_an_exporter():
    rewards = []
    logged(lambda log: rewards.append(log.records[-1]["reward"]))
    assert rewards == [0, 0.125, 0.25]


def test_an_exporter_gets_each_record_once_and_is_closed_once():
    seen, ends = [], []
    with Exporter(lambda record: seen.append(record["step"]), lambda: ends.append(1)) as exporter:
        logged(exporter)
        exporter.close()
    assert (seen, ends) == ([0, 1, 2], [1])


def test_an_exporter_that_nobody_names_any_more_is_closed():
    ends = []
    logged(Exporter(lambda record: None, lambda: ends.append(1)))
    assert ends == [1]


def test_a_closed_exporter_says_so():
    exporter = Exporter(lambda record: None, lambda: None)
    exporter.close()
    with pytest.raises(RuntimeError, match="it was closed, need an open one"):
        logged(exporter)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("tensorboard", lambda: exporters.tensorboard("x")),
        ("wandb", lambda: exporters.wandb(project="x")),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, call, monkeypatch):
    hidden = {"tensorboard": "torch.utils.tensorboard.writer", "wandb": "wandb"}[package]
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(ImportError, match=rf"pip install {package}, or pip install 'rlkit\[log"):
        call()


# ---- TensorBoard ----


def test_tensorboard_reads_numbers_as_scalars_and_strings_as_text(tmp_path):
    pytest.importorskip("tensorboard")
    with exporters.tensorboard(tmp_path) as exporter:
        log = logged(exporter)
    found = event_file(tmp_path)
    scalars = found.Scalars("reward")
    assert [(each.step, each.value) for each in scalars] == [(0, 0), (1, 0.125), (2, 0.25)]
    texts = found.Tensors("actor/loss_hash/text_summary")
    assert [each.tensor_proto.string_val[0] for each in texts] == [b"hash0", b"hash1", b"hash2"]
    assert set(found.Tags()["scalars"]) == set(log.records[0]) - {"step", "actor/loss_hash"}


def test_a_record_can_be_read_before_the_exporter_is_closed(tmp_path):
    pytest.importorskip("tensorboard")
    exporter = exporters.tensorboard(tmp_path)
    logged(exporter, num=1)
    assert len(event_file(tmp_path).Scalars("reward")) == 1
    exporter.close()


# ---- Weights & Biases ----

PROGRAM = """
import sys, psutil
from rlkit import exporters
from rlkit.metrics import MetricLog

log = MetricLog()
exporter = exporters.wandb(project="test", folder=sys.argv[1], config={"lr": 0.375})
log.listen(exporter)
log.add(0, {"reward": 0.1875, "actor/loss_hash": "hash0"})
if sys.argv[2] == "close":
    exporter.close()
    assert not psutil.Process().children(recursive=True)
"""


@pytest.mark.parametrize("how", ["close", "leave open"])
def test_wandb_writes_an_offline_run_and_leaves_no_process(tmp_path, how, nothing_left_running):
    """In a process of its own: wandb starts one beside it."""
    pytest.importorskip("wandb")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    data = file.read_bytes()
    for part in (b"reward", b"0.1875", b"actor/loss_hash", b'"hash0"', b"0.375"):
        assert part in data
