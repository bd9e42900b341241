"""The driver carries no samples: what it receives in a step does not grow with the responses."""

import pytest
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative

pytestmark = pytest.mark.ray

SPEC = rk.ModelSpec(
    vocab_size=23, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=16, max_positions=4200,
)  # fmt: skip


def endless():
    """A model whose tokenizer has no end token: every response has max_new_tokens tokens."""
    model = rk.models.tiny(spec=SPEC)
    text = model.tokenizer.text
    model.tokenizer = rk.models.Tokenizer(text, eos_id=-1, pad_id=0, bos_id=1)
    return model


def step_bytes(cluster, tokens):
    """Bytes the driver receives in one GRPO step with responses of ``tokens`` tokens."""
    model, task = endless(), rk.tasks.reverse_digits(length=4)
    rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=tokens, name=f"roll{tokens}")
    actor = cluster.spawn(rk.ActorWorker, model, name=f"act{tokens}")
    prompts = next(task.batches(size=2, steps=1))
    before = cluster.store.received_bytes
    batch = rollout.generate(prompts, n=2)
    assert batch.lengths("response_ids").tolist() == [tokens] * 4
    batch["rewards"] = rk.score(lambda prompt, response, answer: float(len(answer)), batch)
    batch["old_logprobs"] = actor.compute_logprobs(batch)
    batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
    actor.update(batch, loss_fn=lambda lp, b: clipped_policy_loss(lp, b))
    return cluster.store.received_bytes - before


def test_the_driver_receives_as_much_for_4096_tokens_as_for_64(ray_cluster):
    short, long = step_bytes(ray_cluster, 64), step_bytes(ray_cluster, 4096)
    print(f"bytes received by the driver in a step: T=64 {short:,}, T=4096 {long:,}")
    assert abs(long - short) <= 0.01 * short
    assert short < 4 * 64 * 8 * 10


def test_reading_a_column_is_counted(ray_cluster):
    batch = rk.Batch.from_columns({"x": torch.zeros(4, 1000)}).on(ray_cluster.store)
    before = ray_cluster.store.received_bytes
    assert batch["x"].shape == (4, 1000)
    assert ray_cluster.store.received_bytes - before == 16_000
