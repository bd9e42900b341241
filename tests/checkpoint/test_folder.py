"""What lies in the folder is whole, whatever stopped the process; what is not says so at once."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from short_run import make_model, make_run, records_of, train

import rlkit as rk
from rlkit.workers import shards

LIMIT_S = 2.0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of one step, and a folder where it is saved as of steps 0 and 1, with rows in flight;
    counters say which save it was.
    """
    run = train(make_run(rk.launch(backend="local")), None, steps=1)
    folder = tmp_path_factory.mktemp("saved") / "run"
    checkpoint = rk.Checkpointer(folder)
    for step in range(2):
        save(checkpoint, run, step)
    return run, folder


@pytest.fixture
def run(saved):
    return saved[0]


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the folder, and the run as it was when it was saved there."""
    found = rk.Checkpointer(shutil.copytree(saved[1], tmp_path / "run"))
    found.load(**saved[0].parts)
    return found


def save(checkpoint, run, step):
    batch = run.rollout.generate(next(run.prompts), n=3)
    return checkpoint.save(step, **run.parts, batches={"next": batch}, counters={"saved": step})


def file_of(checkpoint, name, *, step=1):
    (path,) = checkpoint.path.glob(f"*_step_{step}/{name}")
    return path


def fails_soon(call, error, match):
    start = time.monotonic()
    with pytest.raises(error, match=match) as caught:
        call()
    assert time.monotonic() - start < LIMIT_S
    return str(caught.value)


FILES = (
    "workers/actor/weights.0.safetensors",
    "workers/actor/optimizer.0.safetensors",
    "workers/actor/state.json",
    "batches/next/meta.0.safetensors",
    "batches/next/rows_*.0.safetensors",
    "batches/next/rows_*.json",
    "log.json",
    "random.json",
)


def test_these_are_all_the_files(checkpoint):
    (newest,) = checkpoint.path.glob("*_step_1")
    files = {path for path in newest.rglob("*") if path.is_file()}
    assert files == {file_of(checkpoint, name) for name in (*FILES, "index.json")}


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (cut_short, ValueError, "got [0-9]+ bytes, need [0-9]+"),
        (flip_a_bit, ValueError, "got sha256"),
        (lambda path: path.unlink(), FileNotFoundError, "not found, need every file"),
    ],
    ids=["cut", "changed", "missing"],
)
def test_a_damaged_file_is_named_and_changes_nothing(checkpoint, run, name, damage, error, match):
    path = file_of(checkpoint, name)
    damage(path)
    run.log.add(7, reward=0.0)
    before = (run.actor.fingerprints(), run.actor.version, run.prompts.position, len(run.log))
    message = fails_soon(lambda: checkpoint.load(**run.parts), error, match)
    assert str(path) in message
    assert "earlier" in message
    after = (run.actor.fingerprints(), run.actor.version, run.prompts.position, len(run.log))
    assert after == before
    restored = checkpoint.load(**run.parts, step=0)  # the one before is as it was
    assert restored.counters == {"saved": 0}
    assert len(restored.batches["next"]["response"]) == 6


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"sha256": "', "not JSON .* cut short"),
        ("[]", "its sha256 does not fit"),
        ('{"sha256": "0", "content": {"format": 1}}', "its sha256 does not fit"),
    ],
)
def test_a_damaged_index_is_named(checkpoint, run, text, match):
    path = file_of(checkpoint, "index.json")
    path.write_text(text)
    message = fails_soon(lambda: checkpoint.load(**run.parts), ValueError, match)
    assert str(path) in message


def test_a_change_of_the_index_is_noticed(checkpoint, run):
    path = file_of(checkpoint, "index.json")
    path.write_text(path.read_text().replace('"saved": 1', '"saved": 2'))
    fails_soon(lambda: checkpoint.load(**run.parts), ValueError, "its sha256 does not fit")


def test_an_unknown_format_says_which(checkpoint, run):
    path = file_of(checkpoint, "index.json")
    content = json.loads(path.read_text())["content"] | {"format": 99}
    path.unlink()
    rk.checkpoint.folder.write_index(path.parent, content)
    fails_soon(lambda: checkpoint.load(**run.parts), ValueError, "got checkpoint format 99, need 2")


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"hidden_size": 24}, r"got lm_head.weight \(23, 16\) float32, need \(23, 24\) float32"),
        ({"num_layers": 2}, r"model.layers.1.*need .*: this checkpoint is of another model"),
        ({"tie_embeddings": True}, "got lm_head.weight .* need absent"),
    ],
)
def test_a_checkpoint_of_another_model_changes_nothing(checkpoint, spec, match):
    group = rk.launch(backend="local").spawn(rk.ActorWorker, make_model(**spec))
    before = group.fingerprints()
    fails_soon(lambda: checkpoint.load(workers={"actor": group}), ValueError, match)
    assert group.fingerprints() == before


def test_a_checkpoint_of_another_seed_says_which(checkpoint):
    other = make_run(rk.launch(backend="local", seed=5))
    call = lambda: checkpoint.load(**other.parts)
    fails_soon(
        call, ValueError, r"run seed 0, this cluster has 5; need the same: rk.launch\(seed=0"
    )


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path, run):
    (tmp_path / "file").write_text("")
    call = lambda: rk.Checkpointer(tmp_path / "file")
    fails_soon(call, NotADirectoryError, "got a file, need a folder")
    late = rk.Checkpointer(tmp_path / "late")
    (tmp_path / "late").write_text("")
    fails_soon(lambda: save(late, run, 0), NotADirectoryError, "got a file, need a folder")


def test_a_full_disk_leaves_the_checkpoints_there_are(checkpoint, run, monkeypatch):
    whole = shards.write_file

    def until_full(path, data):
        if path.name.startswith("optimizer"):
            path.write_bytes(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, data)

    monkeypatch.setattr(shards, "write_file", until_full)
    message = fails_soon(lambda: save(checkpoint, run, 2), OSError, "No space left on device")
    assert "earlier checkpoints, of steps [0, 1], are intact. Free space" in message
    monkeypatch.undo()
    assert not list(checkpoint.path.glob(".*.partial"))
    assert checkpoint.load(**run.parts).counters == {"saved": 1}
    save(checkpoint, run, 2)


def test_a_write_that_the_system_stops_half_way_leaves_the_checkpoints_there_are(checkpoint, run):
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, hard))  # weights fit, moments do not
    try:
        fails_soon(lambda: save(checkpoint, run, 2), OSError, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(**run.parts).counters == {"saved": 1}


def test_an_interrupt_leaves_the_checkpoints_there_are(checkpoint, run, monkeypatch):
    def interrupted(path, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(shards, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoint, run, 2)
    monkeypatch.undo()
    assert [p.name for p in sorted(checkpoint.path.iterdir())][1:] == [
        "000000_step_0",
        "000001_step_1",
    ]


def kill_at(number: int):
    """Kill this process in its ``number``-th call that changes what is on the disk."""
    left = [number]

    def counted(call, *, halves=False):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if halves:
                    args[0].write_bytes(args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in ("mkdir", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    shards.write_file = counted(shards.write_file, halves=True)


def save_in_a_child(checkpoint, run, batch, *, kill_in_call: int) -> bool:
    """Save in a fork of this process that is killed on the way; whether it lived to the end."""
    child = os.fork()
    if child == 0:
        kill_at(kill_in_call)
        checkpoint.save(2, **run.parts, batches={"next": batch}, counters={"saved": 2})
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_killed_anywhere_in_a_save_leaves_whole_checkpoints(checkpoint, run, tmp_path):
    other, batch = make_run(rk.launch(backend="local")), run.rollout.generate(next(run.prompts))
    seen, calls, lived = set(), 0, False
    while not lived:
        calls += 1
        folder = shutil.copytree(checkpoint.path, tmp_path / str(calls))
        found = rk.Checkpointer(folder)
        found.load(**run.parts)
        lived = save_in_a_child(found, run, batch, kill_in_call=calls)
        for each in rk.checkpoint.folder.saved(folder):  # whatever has a name is whole
            each.verify(each.index()["files"])
        restored = rk.Checkpointer(folder).load(**other.parts)
        assert restored.counters == {"saved": restored.step}
        assert len(restored.batches["next"]["response"]) == {1: 6, 2: 2}[restored.step]
        assert records_of(other) == records_of(run)
        seen.add(restored.step)
        found.save(3, **other.parts)  # the next save clears what the dead one left
        names = [path.name for path in folder.iterdir() if path.name != ".lock"]
        assert len(names) == 2
        assert not [name for name in names if name.startswith(".")]
    assert seen == {1, 2}
    assert calls > 40  # deaths in as many places


def test_all_of_it_is_on_the_disk_before_it_gets_its_name(checkpoint, run, monkeypatch):
    fsync, rename, synced, missing = os.fsync, os.rename, set(), []

    def sync(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def name(old, new):
        if str(old).endswith(".partial"):
            inside = [old, *old.rglob("*")]
            missing.extend(path for path in inside if path.stat().st_ino not in synced)
            synced.clear()
        rename(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", name)
    save(checkpoint, run, 2)
    assert missing == []
    assert synced == {checkpoint.path.stat().st_ino}  # and then the name


def test_only_left_overs_of_checkpoints_are_removed(checkpoint, run):
    mine = checkpoint.path / ".notes.partial"
    mine.mkdir()
    (checkpoint.path / "000007_step").mkdir()
    save(checkpoint, run, 2)
    assert mine.exists()
    assert (checkpoint.path / "000007_step").exists()


def test_two_processes_do_not_save_into_one_folder(checkpoint, run):
    with (checkpoint.path / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        call = lambda: save(checkpoint, run, 2)
        fails_soon(call, RuntimeError, "another process is saving into it")
    save(checkpoint, run, 2)


def test_a_new_run_does_not_push_out_an_old_one(checkpoint, run):
    new = rk.Checkpointer(checkpoint.path)
    message = fails_soon(lambda: save(new, run, 0), ValueError, "has checkpoints of another run")
    assert "load()" in message
    new.load(**run.parts)
    save(new, run, 2)


def test_a_run_whose_load_failed_does_not_push_out_what_is_left(checkpoint, run):
    cut_short(file_of(checkpoint, "log.json"))
    new = rk.Checkpointer(checkpoint.path)
    fails_soon(lambda: new.load(**run.parts), ValueError, "cut short")
    fails_soon(lambda: save(new, run, 2), ValueError, "has checkpoints of another run")


def test_nothing_in_a_checkpoint_is_a_pickle(checkpoint):
    for path in checkpoint.path.rglob("*"):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            assert all(isinstance(t, torch.Tensor) for t in load_file(path).values())
        elif path.is_file() and path.name != ".lock":
            assert path.suffix == ".json"
            json.loads(path.read_text())


def test_a_checkpoint_can_be_read_without_rlkit(checkpoint):
    code = (
        "import json, sys, hashlib, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "index = json.loads((folder / 'index.json').read_text())['content']\n"
        "for name, facts in index['files'].items():\n"
        "    data = (folder / name).read_bytes()\n"
        "    assert hashlib.sha256(data).hexdigest() == facts['sha256'], name\n"
        "print(len(index['files']))"
    )
    (newest,) = checkpoint.path.glob("*_step_1")
    command = [sys.executable, "-c", code, str(newest)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (f"{len(FILES)}\n", "")


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda c, r: c.save(-1, **r.parts), ValueError, "step: got -1"),
        (lambda c, r: c.save(True, **r.parts), ValueError, "step: got True"),
        (lambda c, r: c.save("3", **r.parts), ValueError, "step: got '3'"),
        (
            lambda c, r: c.save(2, workers={"rollout": r.rollout}),
            TypeError,
            r"workers\['rollout'\]: got WorkerGroup.*Rollout and reference workers have nothing",
        ),
        (lambda c, r: c.save(2, workers={"a": 3}), TypeError, r"workers\['a'\]: got 3, need"),
        (
            lambda c, r: c.save(2, **r.parts, batches={"../x": None}),
            ValueError,
            r"batches: got the name '../x', need letters",
        ),
        (
            lambda c, r: c.save(2, **r.parts, counters={"x": torch.ones(2)}),
            TypeError,
            "counters: got Tensor .* can't hold",
        ),
        (
            lambda c, r: c.save(2, **r.parts, batches={"x": [1]}),
            TypeError,
            r"batches\['x'\]: got list, need a Batch",
        ),
        (
            lambda c, r: c.load(**r.parts, step=9),
            ValueError,
            r"got step=9, need one of steps \[0, 1",
        ),
        (
            lambda c, r: c.load(workers={"critic": r.actor}),
            ValueError,
            r"got no critic in this checkpoint, which has the workers \['actor'\]",
        ),
        (
            lambda c, r: rk.Checkpointer(c.path, best=lambda record: 1.0).save(2, workers={}),
            ValueError,
            "has checkpoints of another run",
        ),
        (
            lambda c, r: rk.Checkpointer(c.path / "b", best=lambda record: 1.0).save(2, **r.parts),
            ValueError,
            r"best: got a log without a last record of step 2, need it. .*log.add\(2",
        ),
        (
            lambda c, r: rk.Checkpointer(c.path / "b", best=lambda record: 1.0).save(2, workers={}),
            ValueError,
            "best: got no log",
        ),
        (lambda c, r: rk.Checkpointer(c.path, keep_last=0), ValueError, "keep_last: got 0"),
    ],
)
def test_wrong_calls_say_what_is_needed(checkpoint, run, call, error, match):
    fails_soon(lambda: call(checkpoint, run), error, match)
    assert checkpoint.load(**run.parts).counters == {"saved": 1}


def test_parts_left_out_of_a_load_are_said(checkpoint, run, caplog):
    checkpoint.load(workers={"actor": run.actor})
    assert "prompts, log saved there, not loaded" in caplog.text


def test_a_position_of_another_task_changes_nothing(checkpoint, run):
    before = run.actor.fingerprints()
    prompts = rk.tasks.reverse_digits().stream(size=2)
    call = lambda: checkpoint.load(workers={"actor": run.actor}, prompts=prompts)
    fails_soon(call, ValueError, "prompts: got a position in")
    assert run.actor.fingerprints() == before


def test_the_frame_has_a_row_a_checkpoint(checkpoint):
    frame = checkpoint.frame()
    assert frame["step"].tolist() == [0, 1]
    assert frame["bytes"].min() > 10_000
    assert repr(checkpoint) == f"Checkpointer({str(checkpoint.path)!r}, steps [0, 1])"
