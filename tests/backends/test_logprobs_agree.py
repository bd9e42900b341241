"""TorchBackend.forward: the numbers of a loop over rows and tokens."""

import pytest
import torch
from small_models import FAMILIES, make_model

import rlkit as rk
from rlkit.models.attention import PackedAttention, positions

PROMPTS = [[3, 4], [5, 6, 7, 8], [9], [10, 11, 12]]  # faults C1: of different lengths
RESPONSES = [[5, 2], [7], [3, 3, 3, 4, 9], [12, 2]]


def make_batch(prompts=PROMPTS, responses=RESPONSES, **columns):
    ids = {
        "prompt_ids": [torch.tensor(x) for x in prompts],
        "response_ids": [torch.tensor(x, dtype=torch.int64) for x in responses],
    }
    return rk.Batch.from_columns(ids | columns)


def distributions(model, prompt, response, temperature):
    """[T, V] logprobs, each token's from a run of its own over what came before it."""
    decoder, rows = model.build(), []
    for t in range(len(response)):
        ids = torch.tensor(prompt + response[:t])
        lengths = torch.tensor([len(ids)])
        with torch.no_grad():
            hidden = decoder(ids, positions(lengths), PackedAttention(lengths))
        rows.append(torch.log_softmax(decoder.logits(hidden)[-1].detach() / temperature, -1))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_loop_over_rows_and_tokens(family):  # faults C1
    model, temperatures = make_model(**FAMILIES[family]), [1.0, 0.6, 2.0, 1.0]
    found, _ = rk.TorchBackend(model).forward(make_batch(temperature=temperatures))
    for row, *facts in zip(found.unpack(), PROMPTS, RESPONSES, temperatures, strict=True):
        every = distributions(model, *facts)
        expected = every.gather(1, torch.tensor(facts[1])[:, None])[:, 0]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def test_entropies_are_those_of_a_loop_over_rows_and_tokens():
    model, temperatures = make_model(), [1.0, 0.6, 2.0, 1.0]
    _, found = rk.TorchBackend(model).forward(make_batch(temperature=temperatures), entropy=True)
    for row, *facts in zip(found.unpack(), PROMPTS, RESPONSES, temperatures, strict=True):
        every = distributions(model, *facts)
        torch.testing.assert_close(row, -(every.exp() * every).sum(-1), atol=1e-5, rtol=0)


def test_entropies_are_computed_only_if_asked_for():
    assert rk.TorchBackend(make_model()).forward(make_batch())[1] is None


def test_one_row_at_a_time_gives_the_numbers_of_all_at_once():  # faults C6
    backend, batch = rk.TorchBackend(make_model()), make_batch()
    together = backend.forward(batch)[0].unpack()
    for i, row in enumerate(together):
        alone = backend.forward(batch.select([i]))[0].values
        assert (row - alone).abs().max() < 1e-5


def test_rows_come_back_in_the_order_of_the_batch():
    backend, batch = rk.TorchBackend(make_model()), make_batch()
    expected, turned = backend.forward(batch)[0], backend.forward(batch.select([3, 1, 0, 2]))[0]
    assert torch.allclose(turned.padded(), expected.padded()[[3, 1, 0, 2]], atol=1e-6)


def test_no_temperature_is_temperature_one():
    backend = rk.TorchBackend(make_model())
    given, _ = backend.forward(make_batch(temperature=[1.0] * 4))
    assert torch.equal(backend.forward(make_batch())[0].values, given.values)


def test_temperature_zero_counts_as_one():  # faults C4
    backend = rk.TorchBackend(make_model())
    given, _ = backend.forward(make_batch(temperature=[0.0] * 4))
    assert torch.equal(backend.forward(make_batch())[0].values, given.values)


def test_an_integer_temperature_is_taken():
    backend = rk.TorchBackend(make_model())
    given, _ = backend.forward(make_batch(temperature=[1] * 4))
    assert torch.equal(backend.forward(make_batch())[0].values, given.values)


def test_content_of_padding_does_not_matter():
    backend, padded = rk.TorchBackend(make_model()), torch.tensor([[5, 2, 0, 0], [7, 8, 9, 2]])
    prompts = torch.tensor([[3, 4], [5, 6]])
    other = torch.tensor([[5, 2, 11, 12], [7, 8, 9, 2]])
    one = backend.forward(make_batch(prompts.tolist(), padded.tolist()))[0].padded()
    two = backend.forward(make_batch(prompts.tolist(), other.tolist()))[0].padded()
    assert torch.equal(one[0, :2], two[0, :2])
    assert torch.equal(one[1], two[1])


def test_a_response_without_tokens_has_no_logprobs():
    found, _ = rk.TorchBackend(make_model()).forward(make_batch([[3], [4]], [[], [5, 6]]))
    assert found.lengths.tolist() == [0, 2]


def test_a_batch_of_no_rows_has_no_logprobs():
    found, _ = rk.TorchBackend(make_model()).forward(make_batch().select([]))
    assert found.lengths.tolist() == []


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="prompt_ids: got an empty prompt, need at least one"):
        rk.TorchBackend(make_model()).forward(make_batch([[], [4]], [[5], [6]]))


def test_logprobs_can_enter_a_gradient():
    found, _ = rk.TorchBackend(make_model()).forward(make_batch())
    weight = torch.ones(10, requires_grad=True)
    (weight * found.values).sum().backward()
    assert torch.equal(weight.grad, found.values)
