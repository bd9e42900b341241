"""ActorWorker and ReferenceWorker on their own, without a cluster."""

import functools

import pytest
import torch

import rlkit as rk
from rlkit.algo import AdaptiveKL


def make_batch(rows=4, **more):
    lengths = [1 + i % 3 for i in range(rows)]
    batch = rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor([1, 4, 5])] * rows,
            "response_ids": [torch.arange(6, 6 + n) for n in lengths],
            "response_mask": [torch.ones(n, dtype=torch.int8) for n in lengths],
            "group_ids": [i // 2 for i in range(rows)],
        }
    )
    for name, value in more.items():
        batch[name] = value
    return batch


def likelihood(logprobs, batch):
    return batch.token_mean(-logprobs), {"toy/max": logprobs.max(), "toy/peak_max": logprobs.max()}


def penalised(logprobs, batch, *, coef):
    return batch.token_mean(-logprobs) * coef, {"toy/coef_max": torch.tensor(coef)}


@pytest.fixture
def actor():
    return rk.ActorWorker(rk.models.tiny(), lr=1e-3)


def test_an_update_advances_the_version_by_one(actor):
    actor.update(make_batch(), loss_fn=likelihood, minibatches=2, epochs=3)
    assert actor.version == 1


def test_an_update_follows_the_gradient(actor):
    first = actor.update(make_batch(), loss_fn=likelihood)["policy/loss"]
    for _ in range(5):
        last = actor.update(make_batch(), loss_fn=likelihood)["policy/loss"]
    assert last < first


def test_an_empty_batch_is_an_error(actor):
    with pytest.raises(ValueError, match="empty batch"):
        actor.update(make_batch().select([]), loss_fn=likelihood)


def test_more_minibatches_than_groups_is_an_error(actor):
    with pytest.raises(ValueError, match="got 3 for 2 groups"):
        actor.update(make_batch(), loss_fn=likelihood, minibatches=3)


def test_a_loss_that_is_no_function_is_an_error(actor):
    with pytest.raises(TypeError, match="need a function"):
        actor.update(make_batch(), loss_fn="grpo")


def test_a_loss_of_one_parameter_is_an_error(actor):
    with pytest.raises(TypeError, match=r"need \(logprobs, batch\)"):
        actor.update(make_batch(), loss_fn=lambda logprobs: logprobs.sum())


def test_a_nan_advantage_names_column_row_and_token(actor):
    batch = make_batch()
    advantages = torch.zeros(4, 3)
    advantages[1, 1] = float("nan")
    batch["advantages"] = advantages
    with pytest.raises(ValueError, match="advantages: got nan in the row of uid 1, token 1"):
        actor.update(batch, loss_fn=likelihood)
    assert actor.version == 0


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_names_column_row_and_token(actor, token):
    batch = make_batch()
    rows = [torch.arange(6, 6 + 1 + i % 3) for i in range(4)]
    rows[2][1] = token
    batch["response_ids"] = rows
    message = f"response_ids: got token {token} in the row of uid {batch.uids[2]}, need 0 to"
    for call in (actor.compute_logprobs, lambda batch: actor.update(batch, loss_fn=likelihood)):
        with pytest.raises(ValueError, match=message):
            call(batch)


def test_an_empty_prompt_names_the_row(actor):
    batch = make_batch(2)
    batch["prompt_ids"] = [torch.tensor([1]), torch.tensor([], dtype=torch.int64)]
    with pytest.raises(ValueError, match=f"empty prompt in the row of uid {batch.uids[1]}"):
        actor.compute_logprobs(batch)


def test_nan_under_a_zero_mask_is_allowed(actor):
    batch = make_batch()
    mask, advantages = torch.ones(4, 3, dtype=torch.int8), torch.zeros(4, 3)
    mask[1, 1], advantages[1, 1] = 0, float("nan")
    batch["response_mask"], batch["advantages"] = mask, advantages
    assert actor.update(batch, loss_fn=likelihood)["actor/version"] == 1


def test_a_skipped_stage_is_named_by_the_loss(actor):
    with pytest.raises(KeyError, match=r"rewards.*rk\.score"):
        actor.update(make_batch(), loss_fn=lambda lp, batch: (batch["rewards"].sum() * 0, {}))


def test_an_error_in_the_loss_leaves_weights_and_gradients_alone(actor):
    before = {name: t.clone() for name, t in actor.weights().items()}

    def fails_late(logprobs, batch):
        if len(batch) < 4:
            raise ArithmeticError("late")
        return likelihood(logprobs, batch)

    actor.token_budget = 9
    with pytest.raises(ArithmeticError):
        actor.update(make_batch(), loss_fn=fails_late)
    assert all(torch.equal(before[n], t) for n, t in actor.weights().items())
    fresh = rk.ActorWorker(rk.models.tiny(), lr=1e-3, token_budget=9)
    for worker in (actor, fresh):
        worker.update(make_batch(), loss_fn=likelihood)
    assert all(torch.equal(fresh.weights()[n], t) for n, t in actor.weights().items())


def test_maxima_stay_maxima_over_microbatches(actor):
    actor.token_budget = 4
    metrics = actor.update(make_batch(), loss_fn=likelihood)
    column = rk.ActorWorker(rk.models.tiny()).compute_logprobs(make_batch())
    assert metrics["toy/peak_max"] == pytest.approx(float(column.load().values.max()), abs=1e-5)


def test_logprobs_come_back_in_the_order_of_the_rows(actor):
    batch = make_batch(9)
    whole = actor.compute_logprobs(batch).load(batch.uids).padded()
    actor.token_budget = 7
    assert torch.allclose(actor.compute_logprobs(batch).load(batch.uids).padded(), whole, atol=1e-6)
    back = batch.select(list(range(8, -1, -1)))
    assert torch.allclose(
        actor.compute_logprobs(back).load(back.uids).padded(), whole.flip(0), atol=1e-6
    )


def test_a_reference_does_not_move(actor):
    reference = rk.ReferenceWorker(rk.models.tiny())
    batch = make_batch()
    first = reference.compute_logprobs(batch).load().values
    actor.update(batch, loss_fn=likelihood)
    assert torch.equal(reference.compute_logprobs(batch).load().values, first)


def test_saved_weights_load_again(actor, tmp_path):
    actor.update(make_batch(), loss_fn=likelihood)
    folder = actor.save_pretrained(tmp_path / "model")
    loaded = rk.models.load(folder)
    assert all(torch.equal(loaded.weights[n], t) for n, t in actor.weights().items())


def test_a_loss_may_ask_for_entropy(actor):
    def with_entropy(logprobs, batch, entropy):
        return batch.token_mean(-logprobs), {"policy/entropy": batch.token_mean(entropy)}

    entropy = actor.update(make_batch(), loss_fn=with_entropy)["policy/entropy"]
    assert 0 < entropy < torch.log(torch.tensor(23.0))


def test_the_next_update_has_the_coefficient_that_the_driver_adapted(actor):  # faults F7
    kl, seen = AdaptiveKL(target=0.1, horizon=10, coef=0.5), []
    for _ in range(4):
        loss_fn = functools.partial(penalised, coef=kl.coef)
        seen.append(actor.update(make_batch(), loss_fn=loss_fn)["toy/coef_max"])
        kl = kl.after(1.0, num=4)
    assert seen == pytest.approx([0.5 * 1.08**step for step in range(4)])


def test_a_backend_that_does_not_say_what_is_resident_can_not_be_offloaded():
    actor = rk.ActorWorker(rk.models.tiny(), backend=lambda *_, **__: object())
    with pytest.raises(TypeError, match=r"got a object without resident\(\), need one that says"):
        actor.offload()


@pytest.mark.parametrize("worker", [rk.ActorWorker, rk.CriticWorker, rk.ReferenceWorker])
def test_a_backend_that_is_a_name_or_options_alone_is_an_error(worker):
    for wrong in ("megatron", rk.MegatronOptions()):
        with pytest.raises(TypeError, match=r"need a class such as rk.MegatronBackend; functools"):
            worker(rk.models.tiny(), backend=wrong)
