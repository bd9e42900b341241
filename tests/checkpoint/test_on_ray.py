"""Stop and go on with workers in processes of their own, rows in the stores of the nodes."""

import os
import shutil

import numpy as np
import pytest
import torch
from short_run import loss_fn, make_run, reward, train

import rlkit as rk
from rlkit.batch.rows import Rows
from rlkit.checkpoint.rows import WriteRows

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def straight():
    """Six steps in one process, never stopped."""
    return train(make_run(rk.launch(backend="local")), None, steps=6)


@pytest.fixture(scope="module")
def two(ray_cluster, tmp_path_factory):
    """Three steps with two workers a group, and the folder they are saved in."""
    run, folder = make_run(ray_cluster, n=2), tmp_path_factory.mktemp("two") / "run"
    return train(run, rk.Checkpointer(folder), steps=6, stop=3), folder


@pytest.fixture(scope="module")
def resumed(ray_cluster, two, tmp_path_factory):
    """Three steps more with one worker a group."""
    folder = shutil.copytree(two[1], tmp_path_factory.mktemp("one") / "run")
    return train(make_run(ray_cluster), rk.Checkpointer(folder), steps=6)


@pytest.fixture
def run(resumed):
    """The same workers, for saves and loads of a test's own."""
    return resumed


def test_the_same_uids_are_trained(straight, resumed):
    assert resumed.trained == straight.trained
    assert resumed.texts == straight.texts[3:]


def test_losses_are_those_of_a_run_never_stopped(straight, resumed):
    losses = [[r["policy/loss"] for r in run.log.records] for run in (straight, resumed)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert len(set(losses[0])) == 6


def test_weights_are_those_of_a_run_never_stopped(straight, resumed):
    weights = resumed.actor.weights()
    for name, expected in straight.actor.weights().items():
        assert torch.allclose(weights[name], expected, atol=1e-5)


def test_one_rank_saves_and_every_rank_loads(two):
    run, folder = two
    (saved,) = folder.glob("*_step_2/workers/actor")
    assert sorted(path.name for path in saved.iterdir()) == [
        "optimizer.0.safetensors",
        "state.json",
        "weights.0.safetensors",
    ]
    newest, checkpoint = run.actor.fingerprints(), rk.Checkpointer(folder)
    checkpoint.load(**run.parts, step=1)
    assert run.actor.version == 2
    one, other = run.actor.fingerprints()
    assert one == other != newest[0]
    checkpoint.load(**run.parts)
    assert run.actor.fingerprints() == newest


def test_rows_are_written_and_read_outside_the_driver(run, tmp_path):
    batch = run.rollout.generate(next(run.prompts), n=3)
    store, fetched = batch.store, []
    fetch = store.fetch

    def counted(requests):
        found = fetch(requests)
        fetched.extend(rows.kind for rows in found)
        return found

    store.fetch = counted
    try:
        checkpoint = rk.Checkpointer(tmp_path)
        checkpoint.save(0, **run.parts, batches={"next": batch})
        restored = checkpoint.load(**run.parts).batches["next"]
    finally:
        del store.fetch
    assert fetched == ["objects"]  # the receipt
    assert restored.store is store
    assert restored["response"] == batch["response"]
    assert torch.equal(restored["rollout_logprobs"], batch["rollout_logprobs"])


def test_a_batch_still_being_generated_is_waited_for(run, tmp_path):
    checkpoint = rk.Checkpointer(tmp_path)
    future = run.rollout.submit.generate(next(run.prompts), n=3)
    checkpoint.save(0, **run.parts, batches={"next": future})
    restored = checkpoint.load(**run.parts).batches["next"]
    assert restored.done()
    assert restored.result()["response"] == future.result()["response"]


def test_a_pending_column_is_saved_and_a_restored_batch_goes_on(run, tmp_path):
    checkpoint = rk.Checkpointer(tmp_path)
    batch = run.rollout.generate(next(run.prompts), n=3)
    batch["old_logprobs"] = run.actor.compute_logprobs(batch)
    batch["advantages"] = batch.expand(torch.arange(6.0))
    assert batch.columns["old_logprobs"].pending
    checkpoint.save(0, **run.parts, batches={"next": batch})
    found = checkpoint.load(**run.parts).batches["next"]
    assert torch.equal(found["old_logprobs"], batch["old_logprobs"])
    found["rewards"] = rk.score(reward, found)
    more = run.rollout.generate(next(run.prompts), n=3)
    more["rewards"] = rk.score(reward, more)
    more["old_logprobs"] = run.actor.compute_logprobs(more)
    more["advantages"] = more.expand(torch.arange(6.0))
    both = rk.Batch.concat([found, more])  # restored rows lie where new ones do
    assert run.actor.update(both, loss_fn=loss_fn)["actor/version"] == run.actor.version


def test_an_error_beside_the_rows_leaves_the_checkpoints_there_are(run, tmp_path):
    checkpoint = rk.Checkpointer(tmp_path)
    checkpoint.save(0, **run.parts)
    batch = run.rollout.generate(next(run.prompts), n=3)
    batch["odd"] = [object()] * len(batch)
    with pytest.raises(TypeError, match="column 'odd': got object") as caught:
        checkpoint.save(1, **run.parts, batches={"next": batch})
    assert "batches['next']" in "".join(caught.value.__notes__)
    assert checkpoint.frame()["step"].tolist() == [0]
    assert not list(tmp_path.glob(".*.partial"))


def test_rows_of_a_folder_that_is_gone_name_it(ray_cluster, tmp_path):
    uids = np.arange(2)
    batch = rk.Batch(uids, store=ray_cluster.store, group_ids=uids)
    part = ray_cluster.store.put("x", uids, Rows(torch.ones(2)))
    batch["x"] = rk.Column("x", ray_cluster.store, uids, [part])
    missing = os.fspath(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match="gone"):
        ray_cluster.store.apply(WriteRows(missing), batch, "rows")
