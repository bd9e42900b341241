import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import FAMILIES, make_model, make_spec
from torch.nn import functional as F

from rlkit.models import Decoder, tiny
from rlkit.models.attention import PackedAttention, positions
from rlkit.models.decoder import RMSNorm


def packed_logits(model, sequences: list[list[int]]) -> list[torch.Tensor]:
    """[L_i, V] of each sequence, all packed into one."""
    lengths = torch.tensor([len(s) for s in sequences])
    ids = torch.tensor([t for s in sequences for t in s])
    decoder = model.build()
    with torch.no_grad():
        hidden = decoder(ids, positions(lengths), PackedAttention(lengths))
        return list(decoder.logits(hidden).split(lengths.tolist()))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([3, 2], [0, 1, 2, 0, 1]), ([1, 1], [0, 0]), ([4], [0, 1, 2, 3]), ([], [])],  # C8
)
def test_positions_start_again_in_each_sequence(lengths, expected):
    assert positions(torch.tensor(lengths, dtype=torch.int64)).tolist() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_sequence_has_the_logits_it_has_alone(family):  # faults C8
    model, sequences = make_model(**FAMILIES[family]), [[1, 2, 3], [4, 5]]
    for together, sequence in zip(packed_logits(model, sequences), sequences, strict=True):
        torch.testing.assert_close(together, packed_logits(model, [sequence])[0])


def test_a_token_of_one_sequence_changes_nothing_in_the_next():  # faults C8
    model = make_model()
    first, second = packed_logits(model, [[1, 2, 3], [4, 5]])
    other, same = packed_logits(model, [[7, 2, 3], [4, 5]])
    assert not torch.allclose(first, other)
    assert torch.equal(second, same)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_packing_any_lengths_changes_no_logits(lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    sequences = [torch.randint(23, (n,), generator=generator).tolist() for n in lengths]
    model = make_model(num_kv_heads=1, num_layers=1)
    for together, sequence in zip(packed_logits(model, sequences), sequences, strict=True):
        torch.testing.assert_close(
            together, packed_logits(model, [sequence])[0], atol=1e-5, rtol=1e-5
        )


def test_padding_inside_the_kernel_does_not_reach_the_tokens():
    attend = PackedAttention(torch.tensor([3, 1, 2]))
    q, k, v = torch.randn(3, 6, 2, 4, generator=torch.Generator().manual_seed(0))
    out, pad = attend(0, q, k, v), attend.pad

    def dirty(x):
        return torch.where(
            pad(torch.ones_like(x)) > 0, pad(x), torch.tensor(1e3)
        )  # [S, H, L, D], 1000 where a padding token is

    attend.pad = dirty
    assert torch.equal(attend(0, q, k, v), out)


def test_a_token_sees_only_those_before_it():
    model = make_model()
    (before,), (after,) = packed_logits(model, [[1, 2, 3, 4]]), packed_logits(model, [[1, 2, 3, 5]])
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


def test_an_order_of_tokens_matters():
    model = make_model()
    (one,), (two,) = packed_logits(model, [[1, 2, 3]]), packed_logits(model, [[2, 1, 3]])
    assert not torch.allclose(one[2], two[2])


def test_the_seed_makes_the_weights():
    same, other = tiny(seed=3).weights, tiny(seed=4).weights
    assert all(torch.equal(w, same[name]) for name, w in tiny(seed=3).weights.items())
    assert not torch.equal(same["lm_head.weight"], other["lm_head.weight"])


def test_fresh_norms_are_one_and_biases_zero():
    spec = make_spec(qkv_bias=True, qk_norm=True)
    weights = Decoder(spec).reset(torch.Generator().manual_seed(0)).weights()
    assert {w.unique().item() for n, w in weights.items() if n.endswith("norm.weight")} == {1.0}
    assert {w.unique().item() for n, w in weights.items() if n.endswith("bias")} == {0.0}


def test_a_vocabulary_of_two_works():
    assert packed_logits(make_model(vocab_size=2), [[0, 1, 1]])[0].shape == (3, 2)


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 8)])
def test_a_norm_and_its_gradients_are_those_of_torch(shape):
    norm, x = RMSNorm(8, 1e-6), torch.randn(shape, requires_grad=True)
    torch.nn.init.normal_(norm.weight)
    factors = torch.randn(shape)
    found, expected = norm(x), F.rms_norm(x, (8,), norm.weight, 1e-6)
    gradients = [
        torch.autograd.grad((factors * values).sum(), (x, norm.weight))
        for values in (found, expected)
    ]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
