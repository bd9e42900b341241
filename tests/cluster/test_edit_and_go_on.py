"""A loss edited in a cell between two steps, with two worker processes."""

import pytest
import torch

import rlkit as rk

pytestmark = pytest.mark.ray

CELL = """
SCALE = {scale}
def loss(logprobs, batch):
    value = batch.token_mean(SCALE * logprobs)
    return value, {{"toy/value": value}}
"""


def cell(text):
    """Run a cell as a notebook does.

    Its functions have no module file, their source is known to linecache.
    """
    import linecache

    name = f"<cell {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), space)
    return space


@pytest.fixture(scope="module")
def edited(ray_cluster):
    """Weights and metrics of: step with the first cell, then with the edited one."""
    model = rk.models.tiny(pretrained="reverse_digits")
    actor = ray_cluster.spawn(rk.ActorWorker, model, lr=0.0, n=2, name="edited")
    batch = rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([1, 5, 6])] * 4,
            "response_ids": [torch.tensor([7, 8, 2])] * 4,
            "response_mask": torch.ones(4, 3, dtype=torch.int8),
            "group_ids": [0, 0, 1, 1],
        }
    )
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    log = rk.MetricLog()
    log.add(0, actor.update(batch, loss_fn=cell(CELL.format(scale=1.0))["loss"]))
    before = actor.weights()
    log.add(1, actor.update(batch, loss_fn=cell(CELL.format(scale=-3.0))["loss"]))
    return batch, log, before, actor.weights()


def test_editing_the_loss_leaves_parameters_bit_equal(edited):
    _, _, before, after = edited
    assert all(
        torch.equal(a[name], b[name]) for a, b in zip(before, after, strict=True) for name in a
    )


def test_the_next_step_uses_the_new_formula(edited):
    batch, log, *_ = edited
    mean = float(batch.token_mean(batch["old_logprobs"]))
    assert log.frame()["toy/value"].tolist() == pytest.approx([mean, -3 * mean], rel=1e-5)


def test_the_record_carries_source_and_hash_of_each_step(edited):
    log = edited[1]
    hashes = log.frame()["actor/loss_hash"].tolist()
    assert len(set(hashes)) == 2
    assert ["SCALE * logprobs" in log.sources[key].text for key in hashes] == [True, True]
