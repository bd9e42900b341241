"""Weights are bit-identical after any change of layout and back, over ranks in one process."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import SHEET, cases
from toys import FAMILIES, move, same, states_of, whole

from rlkit.config import Layout
from rlkit.reshard import (
    Shards,
    allgather_swap,
    direct,
    megatron,
    naive,
    pieces,
    plan_reshard,
    reshard_in_process,
    separate,
    shard,
    vllm,
)  # fmt: skip

STRATEGIES = tuple(
    functools.partial(strategy, bucket_mib=600 / 2**20)
    for strategy in (naive, allgather_swap, direct)
)


WAYS = st.sampled_from(STRATEGIES), st.sampled_from(STRATEGIES)


@settings(max_examples=12)
@given(cases(), *WAYS)
def test_there_and_back_is_the_identity(case, there, back):
    check_there_and_back(case, there, back)


@pytest.mark.slow
@settings(max_examples=200)
@given(cases(), *WAYS)
def test_there_and_back_is_the_identity_many_times(case, there, back):
    check_there_and_back(case, there, back)


def check_there_and_back(case, there, back):
    model, train, infer, forms, devices = case
    states = states_of(model, train, forms[0], devices=devices)
    _, shards, _ = move(model, train, infer, states, strategy=there, forms=forms, devices=devices)
    arrived = [s.generation for s in shards]
    for s in shards:
        s.to_training()
    expected = states_of(model, infer, forms[1], devices=devices)
    assert all(same(a, b) for a, b in zip(arrived, expected, strict=True))
    forms = forms[::-1]
    _, shards, _ = move(model, infer, train, arrived, strategy=back, forms=forms, devices=devices)
    assert all(same(s.generation, b) for s, b in zip(shards, states, strict=True))


@settings(max_examples=15)
@given(cases())
def test_disjoint_devices_get_the_same_weights(case):
    model, train, infer, forms, _ = case
    states = states_of(model, train, forms[0])
    devices = train.num_devices, infer.num_devices
    _, shards, _ = move(model, train, infer, states, strategy=direct, forms=forms, devices=devices)
    expected = states_of(model, infer, forms[1])
    found = [s.generation for s in shards[train.num_devices :]]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (SHEET[n][3] > 64)) for n in SHEET]
)
def test_a_layout_of_mindspeed_rl_arrives_bit_by_bit(name):
    model, train, infer, dies = SHEET[name]
    states = states_of(model, train, megatron, devices=dies)
    plan, shards, report = move(model, train, infer, states, devices=dies)
    expected = states_of(model, infer, vllm, devices=dies)
    assert all(same(s.generation, b) for s, b in zip(shards, expected, strict=True))
    assert report.bytes == plan.nbytes
    for s in shards:
        s.to_training()
    assert all(same(s.training, b) for s, b in zip(shards, whole_states(name), strict=True))


def whole_states(name):
    model, train, _, dies = SHEET[name]
    return states_of(model, train, megatron, devices=dies)


def test_a_state_in_a_training_layout_becomes_a_checkpoint_of_hugging_face():
    model, layout = FAMILIES["deepseek"], Layout(tp=2, pp=2, ep=2)
    states = states_of(model, layout, megatron)
    forms = megatron, separate
    plan = plan_reshard(model, layout, Layout(dp=1), dtype="float32", forms=forms,
                        devices=(layout.num_devices, 1), strategy=direct)  # fmt: skip
    shards = [Shards(plan, i, s) for i, s in enumerate([*states, {}])]
    reshard_in_process(shards, version=1)
    assert same(shards[-1].generation, whole(model))


def test_the_measured_peak_is_the_planned_one():
    """Fingerprints and alignment, 24 bytes a piece at most, come on top."""
    model, train, infer = FAMILIES["qwen3 moe"], Layout(tp=2, pp=2), Layout(tp=4)
    for strategy in STRATEGIES:
        states = states_of(model, train, megatron)
        plan, shards, report = move(model, train, infer, states, strategy=strategy)
        pieces = sum(len(m.pieces) for s in shards for ms in s.share.incoming.values() for m in ms)
        assert report.peak_gib * 2**30 <= plan.peak_bytes() + 24 * pieces


def test_direct_fills_generation_tensors_in_place():
    model, train, infer = FAMILIES["llama"], Layout(tp=2), Layout()
    plan = plan_reshard(model, train, infer, dtype="float32", strategy=direct)
    shards = [Shards(plan, i, s) for i, s in enumerate(states_of(model, train, megatron))]
    reshard_in_process(shards, version=1)
    before = {name: t.data_ptr() for name, t in shards[0].generation.items()}
    for new, s in zip(states_of(model, train, megatron, seed=5), shards, strict=True):
        for name, tensor in s.training.items():
            tensor.copy_(new[name])
    reshard_in_process(shards, version=2)
    assert {name: t.data_ptr() for name, t in shards[0].generation.items()} == before
    assert same(shards[0].generation, shard(model, infer, vllm, whole(model, seed=5))[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_pieces_travel_in_place(strategy, monkeypatch):
    """Those in one run need no buffer; all bits arrive, and a changed one is found."""
    monkeypatch.setattr(pieces, "LARGE", 64)
    model, train, infer = FAMILIES["qwen3 moe"], Layout(tp=2, pp=2), Layout(tp=4)
    states = states_of(model, train, megatron)
    _, shards, _ = move(model, train, infer, states, strategy=strategy)
    for s, expected in zip(shards, states_of(model, infer, vllm), strict=True):
        assert same(s.generation, expected)
        messages = [m for each in s.share.incoming.values() for m in each]
        assert sum(m.room() for m in messages) < sum(m.nbytes for m in messages)
        s.to_training()

    def wire(source, message, sent):
        sent = [each.clone() for each in sent]
        for piece, bytes_ in zip(message.pieces, sent, strict=False):
            bytes_[0] ^= piece.in_place
        return sent

    with pytest.raises(RuntimeError, match="differ from what was sent"):
        reshard_in_process(shards, version=2, wire=wire)
