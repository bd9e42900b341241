"""TorchBackend.step: AdamW, clipping, the schedule, and gradients that are not finite."""

import math

import pytest
import torch
from small_models import make_model

import rlkit as rk
from rlkit.config import LearningRate


def make_batch() -> rk.Batch:
    responses = [torch.tensor([5, 2]), torch.tensor([7, 8, 9, 2])]
    return rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([3, 4]), torch.tensor([5])],
            "response_ids": responses,
            "response_mask": [torch.ones(len(x)) for x in responses],
            "advantages": [torch.ones(len(x)) * (1 - 2 * i) for i, x in enumerate(responses)],
        }
    ).as_step()


def loss_fn(logprobs, batch):
    return batch.token_mean(-logprobs * batch["advantages"]), {}


def make_backend(model=None, *, lr=1e-2, **optim) -> rk.TorchBackend:
    return rk.TorchBackend(model or make_model(), lr=lr, optim=rk.OptimConfig(**optim))


def weights(backend) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in backend.state_dict().items()}


def gradients(backend) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in backend.decoder.named_parameters()}


def same(one, two) -> bool:
    return all(torch.equal(w, two[name]) for name, w in one.items())


def test_two_steps_are_adamw_by_hand():
    beta1, beta2, eps, decay, lr = 0.9, 0.95, 1e-8, 0.1, 1e-2
    backend = make_backend(lr=lr, weight_decay=decay, max_grad_norm=math.inf)
    name = "model.layers.0.mlp.up_proj.weight"
    weight = backend.state_dict()[name].double()
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    for t in (1, 2):
        backend.forward_backward(make_batch(), loss_fn)
        grad = gradients(backend)[name].double()
        first = beta1 * first + (1 - beta1) * grad
        second = beta2 * second + (1 - beta2) * grad**2
        root = (second / (1 - beta2**t)).sqrt() + eps
        weight = weight * (1 - lr * decay) - lr * first / (1 - beta1**t) / root
        backend.step()
        torch.testing.assert_close(backend.state_dict()[name].double(), weight, atol=1e-6, rtol=0)


def test_learning_rate_zero_changes_no_bit_and_no_metric():  # faults C6
    backend, records = make_backend(lr=0.0, weight_decay=0.1), []
    before = weights(backend)
    for _ in range(3):
        metrics = backend.forward_backward(make_batch(), loss_fn)
        records.append({k: float(v) for k, v in metrics.items()} | backend.step())
    assert same(weights(backend), before)
    assert records[0] == records[1] == records[2]


def test_training_lowers_the_loss():
    backend, losses = make_backend(lr=3e-3), []
    for _ in range(10):
        losses.append(float(backend.forward_backward(make_batch(), loss_fn)["loss"]))
        backend.step()
    assert losses[-1] < losses[0] - 0.1


def test_the_norm_reported_is_of_the_gradient_before_clipping():
    backend = make_backend(max_grad_norm=1e-3)
    backend.forward_backward(make_batch(), loss_fn)
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients(backend).values()))
    assert backend.step()["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("limit", [1e-3, 1e6, math.inf])
def test_gradients_are_clipped_to_the_norm_allowed(limit):
    backend = make_backend(max_grad_norm=limit)
    backend.forward_backward(make_batch(), loss_fn)
    norm = backend.step()["grad_norm"]
    state = backend.optimizer.state  # the first moment is 0.1 of the clipped gradient
    moments = torch.cat([state[p]["exp_avg"].reshape(-1) for p in backend.decoder.parameters()])
    assert float(moments.norm() / 0.1) == pytest.approx(min(norm, limit), rel=1e-3)


def test_the_rate_follows_the_schedule():
    schedule = LearningRate(warmup_steps=2, decay_steps=2)
    backend = make_backend(lr=0.1, lr_schedule=schedule)
    rates = []
    for _ in range(5):
        backend.forward_backward(make_batch(), loss_fn)
        rates.append(backend.step()["lr"])
        assert backend.optimizer.param_groups[0]["lr"] == rates[-1]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05, 0.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(value):
    backend = make_backend()
    before = weights(backend)
    backend.forward_backward(make_batch(), lambda lp, b: (b.token_mean(lp) * value, {}))
    info = backend.step()
    assert info["skipped_steps"] == 1
    assert not math.isfinite(info["grad_norm"])
    assert same(weights(backend), before)
    assert backend.num_steps == 0


def test_after_a_skipped_step_training_goes_on_as_if_it_had_not_been():
    backend, other = make_backend(), make_backend()
    backend.forward_backward(make_batch(), lambda lp, b: (b.token_mean(lp) * math.nan, {}))
    backend.step()
    for each in (backend, other):
        each.forward_backward(make_batch(), loss_fn)
        assert each.step()["skipped_steps"] == 0
    assert same(weights(backend), weights(other))


def test_a_step_forgets_its_gradients():
    backend, other = make_backend(), make_backend()
    for _ in range(2):
        backend.forward_backward(make_batch(), loss_fn)
        first = gradients(backend)
        backend.step()
    other.load_state_dict(weights(backend))
    assert all(p.grad is None for p in backend.decoder.parameters())
    backend.forward_backward(make_batch(), loss_fn)
    other.forward_backward(make_batch(), loss_fn)
    assert same(gradients(backend), gradients(other))
    assert not same(gradients(backend), first)


def test_zero_grad_forgets_an_interrupted_step():
    backend, other = make_backend(), make_backend()
    backend.forward_backward(make_batch(), loss_fn)
    backend.zero_grad()
    for each in (backend, other):
        each.forward_backward(make_batch(), loss_fn)
    assert same(gradients(backend), gradients(other))


def test_a_step_without_gradients_has_norm_zero():
    backend = make_backend()
    before = weights(backend)
    assert backend.step()["grad_norm"] == 0
    assert same(weights(backend), before)


def test_tied_embeddings_stay_tied_in_training():
    backend = make_backend(make_model(tie_embeddings=True))
    backend.forward_backward(make_batch(), loss_fn)
    backend.step()
    decoder = backend.decoder
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    assert "lm_head.weight" not in backend.state_dict()


def test_weights_can_be_replaced():
    backend, other = make_backend(), make_model(seed=2)
    backend.load_state_dict(other.weights)
    assert same(weights(backend), other.weights)


def test_training_does_not_change_the_model_it_started_from():
    model = make_model()
    before = {name: w.clone() for name, w in model.weights.items()}
    backend = make_backend(model)
    backend.forward_backward(make_batch(), loss_fn)
    backend.step()
    assert same(model.weights, before)


def test_a_negative_rate_is_an_error():
    with pytest.raises(ValueError, match="lr: got -1"):
        make_backend(lr=-1)
