"""TorchBackend.forward_backward: shares of micro-batches and ranks add up."""

from types import SimpleNamespace

import pytest
import torch
from small_models import make_model, make_prompts

import rlkit as rk
from rlkit.algo import clipped_policy_loss, logprobs


def make_batch(num: int = 6, *, seed: int = 0) -> rk.Batch:
    """One optimizer step: responses of 1 to 5 tokens, a fifth of them not trainable."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + i % 5 for i in range(num)]

    def ragged(values):
        return list(values(sum(lengths)).split(lengths))

    batch = rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor(ids) for ids in make_prompts(num)],
            "response_ids": ragged(lambda n: torch.randint(23, (n,), generator=generator)),
            "response_mask": ragged(lambda n: (torch.rand(n, generator=generator) > 0.2).char()),
            "advantages": ragged(lambda n: torch.randn(n, generator=generator)),
            "old_logprobs": ragged(lambda n: -3 + torch.randn(n, generator=generator)),
        }
    )
    return batch.as_step()


def policy_loss(logprobs, batch, entropy):
    loss, metrics = clipped_policy_loss(logprobs, batch)
    bonus = batch.token_mean(entropy)
    return loss - 0.1 * bonus, metrics | {"policy/entropy": bonus}


def gradients(backend: rk.TorchBackend) -> torch.Tensor:
    """All gradients as one flat tensor."""
    return torch.cat([p.grad.reshape(-1) for p in backend.decoder.parameters()])


def run(batch, pieces, loss_fn=policy_loss):
    """Gradients and the metrics of each piece."""
    backend = rk.TorchBackend(make_model())
    return backend, [backend.forward_backward(piece, loss_fn) for piece in pieces]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("logits_at_once", [1, 50, 10**6])
def test_logits_in_pieces_and_recomputed_blocks_change_no_gradient(
    recompute, logits_at_once, monkeypatch
):
    batch = make_batch()
    whole, (expected,) = run(batch, [batch])
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", logits_at_once)
    other = rk.TorchBackend(make_model(), options=rk.TorchOptions(recompute=recompute))
    found = other.forward_backward(batch, policy_loss)
    torch.testing.assert_close(gradients(other), gradients(whole), atol=1e-6, rtol=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("budget", [1, 8, 20])
def test_micro_batches_add_up_to_the_gradient_of_one_batch(budget, seed):
    batch = make_batch(seed=seed)
    whole, (expected,) = run(batch, [batch])
    parts, found = run(batch, batch.microbatches(budget))
    torch.testing.assert_close(gradients(parts), gradients(whole), atol=1e-6, rtol=1e-4)
    assert found[0].keys() == expected.keys()
    for name in expected:
        values = [float(share[name]) for share in found]
        total = max(values) if name.endswith("_max") else sum(values)
        assert total == pytest.approx(float(expected[name]), rel=1e-4, abs=1e-5)


def test_micro_batches_of_one_row_are_many():
    assert len(make_batch().microbatches(1)) == 6


def test_ranks_add_up_to_the_gradient_of_one_rank():
    batch = make_batch()
    whole, _ = run(batch, [batch])
    expected = gradients(whole).clone()
    other, _ = run(batch, [batch.shard(1, 2)])
    summed = []

    def reduce(flat):
        flat += gradients(other)
        summed.append(flat.clone())

    context = rk.WorkerContext(dp_size=2, collective=SimpleNamespace(sum_=reduce))
    backend = rk.TorchBackend(make_model(), context=context)
    backend.forward_backward(batch.shard(0, 2), policy_loss)
    backend.step()
    whole.step()
    torch.testing.assert_close(summed[0], expected, atol=1e-6, rtol=1e-4)
    for one, two in zip(backend.state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two)
    assert backend.layout == rk.Layout(dp=2)


def test_token_means_of_uneven_micro_batches_are_the_mean_over_tokens():  # faults B1, B14
    batch = rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([3])] * 2,
            "response_ids": [torch.tensor([4]), torch.tensor([5, 6, 7])],
            "response_mask": [torch.ones(1), torch.ones(3)],
            "value": [torch.tensor([4.0]), torch.tensor([1.0, 1.0, 1.0])],
        }
    ).as_step()

    def loss_fn(logprobs, batch):
        loss = batch.token_mean(batch["value"] + 0 * logprobs)
        return loss, {"x": loss}

    _, shares = run(batch, batch.microbatches(1), loss_fn)
    assert len(shares) == 2
    assert sum(float(share["x"]) for share in shares) == 1.75
    assert sum(float(share["loss"]) for share in shares) == 1.75


def test_tokens_outside_the_mask_have_no_gradient():
    batch = make_batch()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    backend, (metrics,) = run(batch.as_step(), [batch.as_step()])
    assert gradients(backend).abs().sum() == 0
    assert metrics["loss"] == 0


def test_a_loss_of_value_zero_has_its_gradient():  # faults B15
    def loss_fn(logprobs, batch):
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.where(torch.arange(len(batch))[:, None] < 3, 1.0, -1.0)
        return batch.token_mean((ratio - 1) * advantages), {}

    batch = make_batch()
    backend, (metrics,) = run(batch, [batch], loss_fn)
    before = {name: w.clone() for name, w in backend.state_dict().items()}
    assert metrics["loss"] == 0
    assert backend.step()["grad_norm"] > 0
    assert not all(torch.equal(w, before[name]) for name, w in backend.state_dict().items())


def test_entropy_is_given_to_a_loss_that_names_it():
    seen, batch = [], make_batch()

    def loss_fn(logprobs, batch, *, entropy):
        seen.append(entropy)
        return batch.token_mean(logprobs), {}

    backend, _ = run(batch, [batch], loss_fn)
    expected = backend.forward(batch, entropy=True)[1].padded()
    torch.testing.assert_close(seen[0].detach(), expected)
    assert seen[0].requires_grad


def test_entropy_is_not_given_to_a_loss_that_does_not_name_it():
    def loss_fn(logprobs, batch, *rest, **named):
        assert not rest
        assert not named
        return batch.token_mean(logprobs), {}

    run(make_batch(), [make_batch()], loss_fn)


def test_a_loss_sees_the_logprobs_of_forward():
    seen, batch = [], make_batch()

    def loss_fn(logprobs, batch):
        seen.append(logprobs.detach())
        return batch.token_mean(logprobs), {}

    backend, _ = run(batch, [batch], loss_fn)
    torch.testing.assert_close(seen[0], backend.forward(batch)[0].padded())


def test_metrics_carry_no_graph():
    batch = make_batch()
    loss_fn = lambda logprobs, batch: (batch.token_mean(logprobs), {"x": logprobs.sum()})
    _, (metrics,) = run(batch, [batch], loss_fn)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "got NoneType back, need"),
        (torch.tensor(1.0), "got Tensor back, need"),
        ((torch.tensor(1.0),), r"got \(Tensor\) back, need"),
        ((torch.tensor(1.0), None), r"got \(Tensor, NoneType\) back, need"),
        ((torch.tensor(1.0), {}, 1), r"got \(Tensor, dict, int\) back, need"),
        (({}, torch.tensor(1.0)), r"got \(dict, Tensor\) back, need"),
        ((1.0, {}), "got a loss of shape float, need a 0-d tensor"),
        ((torch.ones(2, 3), {}), r"got a loss of shape \(2, 3\), need a 0-d tensor"),
        ((torch.ones(1), {}), r"got a loss of shape \(1,\), need a 0-d tensor"),
        ((torch.tensor(1.0), {"x": torch.ones(2)}), r"metric 'x' has shape \(2,\)"),
        ((torch.tensor(1.0), {"x": [1, 2]}), r"metric 'x'"),
        ((torch.tensor(1.0), {"x": "high"}), r"metric 'x': got str"),
        ((torch.tensor(1.0), {"x": None}), r"metric 'x': got NoneType"),
    ],
)
def test_a_loss_that_returns_something_else_is_a_type_error(result, message):
    with pytest.raises(TypeError, match="loss_fn: .*" + message):
        run(make_batch(), [make_batch()], lambda logprobs, batch: result)


def test_plain_numbers_are_metrics_too():
    batch = make_batch()
    _, (metrics,) = run(batch, [batch], lambda logprobs, b: (b.token_mean(logprobs), {"x": 2}))
    assert metrics["x"] == 2.0
