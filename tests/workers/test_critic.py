"""CriticWorker on its own, without a cluster."""

import pytest
import torch
from small_models import make_model
from test_train import make_batch

import rlkit as rk
from rlkit.algo import clipped_value_loss
from rlkit.glossary import GLOSSARY


def make_critic(**options):
    """A critic whose values are not all 0."""
    critic = rk.CriticWorker(make_model(), **options)
    head = critic.backend.decoder.value_head
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, head.weight.numel())[None])
        head.bias.fill_(0.5)
    return critic


def values_of(critic, batch):
    return critic.compute_values(batch).load(batch.uids).padded()  # [B, T]


def squared(values, batch):
    return batch.token_mean((values - 1).square()), {}


def test_every_value_is_zero_at_first():
    assert values_of(rk.CriticWorker(make_model()), make_batch()).abs().max() == 0


def test_the_body_starts_from_the_policy():
    model = make_model()
    weights = rk.CriticWorker(model).backend.state_dict()
    body = [name for name in model.weights if name.startswith("model.")]
    assert body
    assert all(torch.equal(weights[name], model.weights[name]) for name in body)
    assert weights.keys() - set(body) == {"value_head.weight", "value_head.bias"}


def test_a_policy_with_tied_embeddings_gives_a_critic():
    critic = rk.CriticWorker(make_model(tie_embeddings=True))
    assert values_of(critic, make_batch()).shape == (4, 3)


def test_a_value_speaks_of_the_state_before_its_token():
    critic, batch = make_critic(), make_batch()
    before = values_of(critic, batch)
    ids = batch["response_ids"]
    ids[2, 1] += 1  # the second of three tokens
    batch["response_ids"] = ids
    after = values_of(critic, batch)
    changed = (before != after).nonzero().tolist()
    assert changed == [[2, 2]]


def test_values_come_back_in_the_order_of_the_rows():
    critic, batch = make_critic(), make_batch(9)
    whole = values_of(critic, batch)
    critic.token_budget = 7
    torch.testing.assert_close(values_of(critic, batch), whole)


def test_a_response_of_one_token_keeps_its_row():  # faults B13
    batch = make_batch(1)
    assert values_of(make_critic(), batch).shape == (1, 1)


def test_temperature_does_not_touch_values():
    critic, batch = make_critic(), make_batch()
    whole = values_of(critic, batch)
    batch["temperature"] = torch.full((4,), 0.5)
    assert torch.equal(values_of(critic, batch), whole)


def with_returns(batch, critic):
    batch["values"] = critic.compute_values(batch)
    batch["returns"] = torch.ones_like(batch["values"])
    return batch


def test_updates_bring_values_to_the_returns():
    critic = rk.CriticWorker(rk.models.tiny(), lr=1e-2)
    for _ in range(30):
        batch = with_returns(make_batch(), critic)
        metrics = critic.update(batch)
    mask = batch["response_mask"].bool()
    assert (values_of(critic, batch)[mask] - 1).abs().max() < 0.1
    assert critic.version == metrics["critic/version"] == 30


def test_metrics_are_of_the_critic_and_in_the_glossary():
    critic = make_critic()
    metrics = critic.update(with_returns(make_batch(), critic))
    assert {name.split("/")[0] for name in metrics} == {"critic"}
    assert metrics.keys() <= GLOSSARY.keys()


def test_the_metric_of_a_custom_loss_is_the_critics():
    metrics = make_critic().update(make_batch(), loss_fn=squared)
    assert metrics["critic/loss"] > 0
    assert "policy/loss" not in metrics


@pytest.mark.parametrize("budget", [1, 8])
def test_micro_batches_make_the_step_of_one_batch(budget):
    one, many = make_critic(lr=1e-2), make_critic(lr=1e-2, token_budget=budget)
    for critic in (one, many):
        critic.update(with_returns(make_batch(), critic), minibatches=2)
    for name, weights in one.backend.state_dict().items():
        torch.testing.assert_close(many.backend.state_dict()[name], weights, atol=1e-5, rtol=1e-4)


def test_a_loss_that_asks_for_entropy_is_told_that_there_is_none():
    with pytest.raises(TypeError, match=r"got a parameter 'entropy'.* need \(values, batch\)"):
        make_critic().update(
            make_batch(), loss_fn=lambda values, batch, entropy: (values.sum(), {})
        )


def test_returns_that_are_not_finite_are_named():
    critic = make_critic()
    batch = with_returns(make_batch(), critic)
    batch["returns"] = torch.full((4, 3), float("nan"))
    with pytest.raises(ValueError, match="returns: got nan in the row of uid 0, token 0"):
        critic.update(batch)


def test_a_saved_critic_goes_on_to_the_bit(tmp_path):
    one, other = make_critic(lr=1e-2), rk.CriticWorker(make_model(seed=2), lr=1e-2)
    one.update(with_returns(make_batch(), one))
    one.save_state(tmp_path)
    other.load_state(tmp_path)
    for critic in (one, other):
        critic.update(with_returns(make_batch(), critic), loss_fn=clipped_value_loss)
    assert other.version == 2
    for name, weights in one.backend.state_dict().items():
        assert torch.equal(other.backend.state_dict()[name], weights)


def test_a_policys_state_is_refused(tmp_path):
    rk.ActorWorker(make_model()).save_state(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head.*another model"):
        make_critic().load_state(tmp_path)


def test_memory_counts_weights_and_optimizer():
    critic = make_critic(lr=1e-2)
    critic.update(with_returns(make_batch(), critic))
    memory = critic.memory()
    assert memory["optimizer"] > memory["weights"] > 0
