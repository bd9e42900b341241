"""Planned memory is what a worker really holds, phase by phase."""

import gc

import pytest
import torch
from small_models import make_model, make_spec
from test_gradients import make_batch, policy_loss

import rlkit as rk
from rlkit.algo import clipped_policy_loss
from rlkit.backends.memory import planned, saved_bytes
from rlkit.trace import storage_bytes
from rlkit.workers.memory import of_backend

SHAPES = [
    {},
    {"num_kv_heads": 1, "qk_norm": True},
    {"qkv_bias": True, "tie_embeddings": True},
    {"hidden_size": 64, "intermediate_size": 160, "num_layers": 3},
]


def sizes_of(batch):
    """(tokens of each row that the model reads, response tokens)."""
    responses = [len(ids) for ids in batch._column("response_ids").load(batch.uids).unpack()]
    prompts = [len(ids) for ids in batch._column("prompt_ids").load(batch.uids).unpack()]
    return [p + r - 1 for p, r in zip(prompts, responses, strict=True)], sum(responses)


@pytest.mark.parametrize("changes", SHAPES)
def test_weights_gradients_and_optimizer_are_planned_to_the_byte(changes):
    backend, batch = rk.TorchBackend(make_model(**changes)), make_batch()
    lengths, num_predicted = sizes_of(batch)
    plan = planned(make_spec(**changes), lengths, num_predicted=num_predicted)
    assert of_backend(backend)["weights"] == plan["weights"]
    backend.forward_backward(batch, policy_loss)
    assert of_backend(backend)["gradients"] == plan["gradients"]
    backend.step()
    after = of_backend(backend)
    assert (after["gradients"], after["optimizer"]) == (0, plan["optimizer"])


@pytest.mark.parametrize("num", [1, 6, 20])
@pytest.mark.parametrize("changes", SHAPES)
def test_activations_are_planned_within_15_percent(changes, num):
    backend, batch = rk.TorchBackend(make_model(**changes)), make_batch(num)
    lengths, num_predicted = sizes_of(batch)
    plan = planned(make_spec(**changes), lengths, num_predicted=num_predicted)
    with saved_bytes(list(backend.decoder.parameters())) as found:
        backend.forward_backward(batch, clipped_policy_loss)
    assert plan["activations"] == pytest.approx(found[0], rel=0.15)


def test_recomputing_plans_and_keeps_less():
    shape, batch = SHAPES[-1] | {"num_layers": 6}, make_batch(12)
    lengths, num_predicted = sizes_of(batch)
    spec, kept = make_spec(**shape), []
    for recompute in (False, True):
        backend = rk.TorchBackend(make_model(**shape), options=rk.TorchOptions(recompute=recompute))
        with saved_bytes(list(backend.decoder.parameters())) as found:
            backend.forward_backward(batch, policy_loss)
        plan = planned(spec, lengths, num_predicted=num_predicted, recompute=recompute)
        kept.append((plan["activations"], found[0]))
    assert kept[1][0] < kept[0][0] / 2
    assert kept[1][1] < kept[1][0] < kept[0][1] / 2  # the plan has a block's own, too


def tensors_held() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    return storage_bytes(x for x in gc.get_objects() if type(x) is torch.Tensor)


def test_three_cycles_of_sleep_and_wake_leave_nothing_behind():
    rollout = rk.RolloutWorker(rk.models.tiny(seed=0), max_new_tokens=4)
    task, asleep, awake = rk.tasks.reverse_digits(length=3), [], []
    for prompts in task.batches(size=4, steps=4):
        rollout.generate(prompts, n=2)
        awake.append(rollout.memory())
        rollout.sleep()
        asleep.append((rollout.memory(), tensors_held()))
        rollout.wake()
    assert awake[1:] == awake[1:2] * 3
    assert asleep[1:] == asleep[1:2] * 3
    assert set(asleep[0][0]) == {"weights"}
