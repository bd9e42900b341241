"""The fused forward pass is the decoder's, and holds its weights once."""

import pytest
import torch
from small_models import FAMILIES, make_model

from rlkit.engines.fused import FusedDecoder, fuse
from rlkit.models.attention import PackedAttention, positions
from rlkit.trace import storage_bytes

LENGTHS = torch.tensor([5, 1, 7])


def run(decoder):
    """Logits of three packed sequences."""
    ids = torch.randint(0, 23, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = decoder(ids, positions(LENGTHS), PackedAttention(LENGTHS))
        return decoder.logits(hidden)


def fused_of(model, *, max_len=8):
    fused = FusedDecoder(model.build())
    fused.reserve(max_len)
    return fused


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_decoders(family):
    model = make_model(**FAMILIES[family])
    torch.testing.assert_close(run(fused_of(model)), run(model.build()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_weights_are_in_use_at_once(family):
    old, new = (make_model(seed=seed, **FAMILIES[family]) for seed in (1, 2))
    fused = fused_of(old)
    fused.load_weights(new.weights)
    torch.testing.assert_close(run(fused), run(new.build()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_held_once_under_their_own_names(family):
    model = make_model(**FAMILIES[family])
    weights = FusedDecoder(model.build()).weights()
    assert weights.keys() == model.weights.keys()
    assert all(torch.equal(weights[name], model.weights[name]) for name in weights)
    assert storage_bytes(weights.values()) == 4 * model.spec.num_parameters


def test_a_fused_matrix_is_the_parts_side_by_side():
    parts = [torch.nn.Linear(2, 1), torch.nn.Linear(2, 2)]
    weights = [part.weight.detach().clone() for part in parts]
    matrix, bias = fuse(parts)
    assert torch.equal(matrix, torch.cat(weights).t())
    assert bias is not None
    parts[1].bias.fill_(7.0)
    assert bias[1:].tolist() == [7.0, 7.0]


def test_positions_may_grow():
    model = make_model()
    fused = fused_of(model, max_len=7)
    before = run(fused)
    fused.reserve(40)
    fused.reserve(3)
    assert torch.equal(run(fused), before)
    assert len(fused.rope) == 40
