"""Faults that other systems had with weights on the move, each with a tiny input."""

import dataclasses
import functools
import logging

import pytest
import torch
from small_models import make_model, make_prompts
from toys import FAMILIES, MOE, move, same, shards_of, states_of, whole

import rlkit as rk
from rlkit import device
from rlkit.config import Layout, SamplingParams
from rlkit.engines import Request, TorchEngine
from rlkit.reshard import (
    allgather_swap,
    direct,
    megatron,
    naive,
    plan_reshard,
    reshard_in_process,
    reshard_over,
    separate,
    shard,
    vllm,
)

ENGINE = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
}
MODEL, TRAIN = FAMILIES["llama"], Layout(tp=2, pp=2)
SMALL = functools.partial(direct, bucket_mib=600 / 2**20)


def to_engine(engine: TorchEngine, model, states, *, version: int) -> None:
    """Reshard training shards on four ranks to the engine's layout and load them."""
    plan = plan_reshard(model.spec, TRAIN, Layout(), dtype="float32", forms=(megatron, separate))
    shards = shards_of(plan, states)
    reshard_in_process(shards, version=version)
    engine.load_weights(shards[0].generation, version=version)
    for s in shards:
        s.to_training()


def responses(engine: TorchEngine) -> list:
    sampling = SamplingParams(max_new_tokens=8)
    return engine.generate([Request(p, [i], sampling) for i, p in enumerate(make_prompts(4))])


def test_tied_embeddings_change_at_both_ends():
    """vllm #5621."""
    model = make_model(**ENGINE, tie_embeddings=True)
    engine = TorchEngine(model)
    states = shard(model.spec, TRAIN, megatron, model.weights)
    for state in states:  # rank 0 of either stage holds row 3, in one name or the other
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in state and state is not states[1] and state is not states[3]:
                state[name][3] += 1
    to_engine(engine, model, states, version=1)
    expected = model.weights["model.embed_tokens.weight"].clone()
    expected[3] += 1
    assert torch.equal(engine.decoder.inner.model.embed_tokens.weight, expected)
    assert torch.equal(engine.decoder.head.T, expected)


def test_the_router_bias_arrives_in_fp32():
    """Megatron-LM #1482: bf16 makes 0.5 and 0.50049 equal, and the router picks the other."""
    model = FAMILIES["deepseek"]
    tensors = {name: t.bfloat16() for name, t in whole(model).items()}
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for key in (n for n in tensors if n.endswith("correction_bias")):
        tensors[key] = torch.tensor([0.5, 0.50049, *[0.0] * 6])
    states = shard(model, Layout(tp=2), megatron, tensors)
    plan = plan_reshard(model, Layout(tp=2), Layout())
    shards = shards_of(plan, states)
    reshard_in_process(shards, version=1)
    arrived = shards[1].generation[name]
    assert arrived.dtype == torch.float32
    assert int(arrived.argmax()) == 1
    assert int(arrived.bfloat16().argmax()) == 0


def test_a_router_bias_in_bf16_is_refused_by_name():
    model = FAMILIES["deepseek"]
    states = states_of(model, Layout(), megatron)
    name = "decoder.layers.1.mlp.router.expert_bias"
    states[0][name] = states[0][name].bfloat16()
    plan = plan_reshard(model, Layout(), Layout(), dtype="float32")
    with pytest.raises(
        ValueError, match=rf"{name} is \(8,\) of torch.bfloat16, the plan says .*32"
    ):
        shards_of(plan, states)


@pytest.mark.parametrize("strategy", [naive, allgather_swap, direct])
def test_an_expert_keeps_its_global_number(strategy):
    """slime #1799: of 8 experts on EP 4, expert 5 of the engine holds fives."""
    model = dataclasses.replace(FAMILIES["qwen3 moe"], moe=MOE)
    tensors = whole(model)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(int(name.split(".experts.")[1].split(".")[0]))
    states = shard(model, Layout(ep=4, dp=4), megatron, tensors)
    _, shards, _ = move(model, Layout(ep=4), Layout(ep=2), states, strategy=strategy)
    fused = shards[1].generation["model.layers.0.mlp.experts.w13_weight"]  # experts 4 to 7
    assert [float(expert.unique()) for expert in fused] == [4, 5, 6, 7]


def lost(bucket: int):
    """A wire that loses one bucket."""
    return lambda source, message, sent: None if message.bucket == bucket else sent


def zeros(source, message, sent):
    """A sender that sends nothing, in messages of the right size."""
    return [torch.zeros_like(each) for each in sent]


@pytest.mark.parametrize("strategy", [naive, allgather_swap, direct])
def test_a_missing_bucket_keeps_the_old_version(strategy):
    """tokenspeed #672: a middle bucket."""
    strategy = functools.partial(strategy, bucket_mib=600 / 2**20)
    plan = plan_reshard(MODEL, TRAIN, Layout(tp=4), dtype="float32", strategy=strategy)
    middle = sorted(set(plan.moves.bucket[plan.moves.source != plan.moves.target].tolist()))
    assert len(middle) > 2
    middle = middle[len(middle) // 2]
    shards = shards_of(plan, states_of(MODEL, TRAIN, megatron))
    reshard_in_process(shards, version=1)
    for s in shards:
        s.to_training()
    with pytest.raises(RuntimeError, match=f"of bucket {middle} nothing arrived at rank"):
        reshard_in_process(shards, version=2, wire=lost(middle))
    assert [s.version for s in shards] == [1] * 4
    reshard_in_process(shards, version=2)  # training shards were where they belong
    expected = states_of(MODEL, Layout(tp=4), vllm)
    assert all(same(s.generation, e) for s, e in zip(shards, expected, strict=True))


def test_a_sender_that_sends_nothing_is_an_error_and_no_version():
    """tokenspeed #1373."""
    plan = plan_reshard(MODEL, TRAIN, Layout(tp=4), dtype="float32", strategy=direct)
    shards = shards_of(plan, states_of(MODEL, TRAIN, megatron))
    with pytest.raises(RuntimeError, match=r"pieces differ from what was sent, first .*version 0"):
        reshard_in_process(shards, version=1, wire=zeros)
    assert [s.version for s in shards] == [0] * 4
    with pytest.raises(RuntimeError, match="because a reshard failed in place"):
        _ = shards[0].generation


@pytest.mark.parametrize("strategy", [allgather_swap, SMALL])
@pytest.mark.parametrize("elementwise", [False, True])
def test_one_wrong_element_is_found_by_name_and_index(strategy, elementwise):
    wanted, corners = "model.layers.2.mlp.down_proj.weight", []

    def wire(source, message, sent):
        sent = [each.clone() for each in sent]
        for piece, found in zip(message.pieces, sent, strict=False):
            if piece.name == wanted and message.peer == 0 and not corners:
                corners.append(piece.corner)
                found[4] ^= 1  # of the second element
        return sent

    plan = plan_reshard(MODEL, TRAIN, Layout(tp=4), dtype="float32", strategy=strategy)
    shards = shards_of(plan, states_of(MODEL, TRAIN, megatron))
    with pytest.raises(RuntimeError) as error:
        reshard_in_process(shards, version=1, wire=wire, elementwise=elementwise)
    ((row, column),) = corners
    place = f"[{row}, {column + 1}]" if elementwise else ""
    assert f"'{wanted}{place}'" in str(error.value)


def test_messages_of_an_earlier_reshard_are_no_messages():
    plan = plan_reshard(MODEL, TRAIN, Layout(tp=4), dtype="float32", strategy=direct)
    shards, kept = shards_of(plan, states_of(MODEL, TRAIN, megatron)), {}

    def keep(source, message, sent):
        sent = [each.clone() for each in sent]
        return kept.setdefault((source, message.bucket, message.peer), sent)

    reshard_in_process(shards, version=1, wire=keep)
    with pytest.raises(RuntimeError, match="version 1 stays"):
        reshard_in_process(shards, version=2, wire=keep)


def test_what_is_gathered_and_not_kept_may_be_wrong():
    """Rank 0 of 4 keeps a quarter of a tensor that naive brings it whole."""
    plan = plan_reshard(MODEL, Layout(tp=4), Layout(tp=4), dtype="float32", strategy=naive)
    shards = shards_of(plan, states_of(MODEL, Layout(tp=4), megatron))

    def wire(source, message, sent):
        sent = [each.clone() for each in sent]
        for piece, found in zip(message.pieces, sent, strict=False):
            if not piece.name.startswith("lm_head") and "embed" not in piece.name:
                found[0] ^= 1
        return sent

    reshard_in_process(shards, version=1, wire=wire)
    expected = states_of(MODEL, Layout(tp=4), vllm)
    assert all(same(s.generation, e) for s, e in zip(shards, expected, strict=True))


def test_no_cache_survives_a_change_of_weights():
    """vllm #9744: the engine's logprobs are those of one that never had other weights."""
    old, new = make_model(1, **ENGINE), make_model(2, **ENGINE)
    engine = TorchEngine(old, seed=3)
    responses(engine)
    to_engine(engine, old, shard(old.spec, TRAIN, megatron, new.weights), version=1)
    for warm, cold in zip(responses(engine), responses(TorchEngine(new, seed=3)), strict=True):
        assert torch.equal(warm.token_ids, cold.token_ids)
        assert torch.equal(warm.logprobs, cold.logprobs)
        assert set(warm.token_version.tolist()) == {1}


def test_buckets_go_in_one_order_at_every_rank_and_are_logged(caplog):
    """trl #7103: one rank that gathers while the other sends hangs."""
    plan = plan_reshard(MODEL, Layout(pp=2, stages=(3, 1)), Layout(tp=2), strategy=SMALL)
    for rank in (0, 1):
        share = rk.reshard.Shards.share.func(type("S", (), {"plan": plan, "rank": rank}))
        for messages in (share.outgoing, share.incoming):
            order = [(m.bucket, m.peer) for each in messages.values() for m in each]
            assert order == sorted(order)
    plan = plan_reshard(MODEL, Layout(), Layout(), dtype="float32", strategy=SMALL)
    (shards,) = shards_of(plan, states_of(MODEL, Layout(), megatron))
    group = device.process_group(
        "cpu", store=torch.distributed.HashStore(), rank=0, size=1, timeout_s=5
    )
    with caplog.at_level(logging.DEBUG, logger="rlkit.reshard"):
        reshard_over(group, shards, version=1)
    said = [int(r.getMessage().split("bucket ")[1].split()[0]) for r in caplog.records]
    assert said == sorted(said)
    assert said


def test_a_plan_of_another_layout_is_refused():
    """SkyRL #1345: change PP, and the plan is another; the old one names what does not fit."""
    stale = plan_reshard(MODEL, Layout(tp=2, pp=2), Layout(), dtype="float32")
    states = states_of(MODEL, Layout(tp=2, pp=1), megatron)
    with pytest.raises(
        ValueError, match=r"rank 0: .* is .*, the plan says .*Was the plan made for"
    ):
        shards_of(stale, states)
    new = plan_reshard(MODEL, Layout(tp=2, pp=1), Layout(), dtype="float32")
    assert new.totals() != stale.totals()
    reshard_in_process(shards_of(new, states), version=1)


def test_three_cycles_of_sleep_leave_memory_and_weights_as_they_were():
    """vllm-ascend #977: asleep the engine and the shards hold the same each time."""
    model = make_model(**ENGINE)
    engine, asleep = TorchEngine(model, seed=3), []
    plan = plan_reshard(model.spec, TRAIN, Layout(), dtype="float32", forms=(megatron, separate))
    shards = shards_of(plan, shard(model.spec, TRAIN, megatron, model.weights))
    buffers = {name: b.clone() for name, b in engine.decoder.inner.named_buffers()}
    before = responses(engine)
    for version in (1, 2, 3):
        engine.sleep()
        asleep.append([s.memory() for s in shards] + [engine.cache])
        engine.wake()
        reshard_in_process(shards, version=version)
        engine.load_weights(shards[0].generation, version=version)
        for now, then in zip(responses(engine), before, strict=True):
            assert torch.equal(now.logprobs, then.logprobs)
        for s in shards:
            s.to_training()
    assert asleep[1] == asleep[2]  # before the first cycle there is no host memory yet
    assert {name: b.clone() for name, b in engine.decoder.inner.named_buffers()} == buffers


def test_an_engine_serves_on_after_a_reshard_that_failed():
    model = make_model(**ENGINE)
    engine = TorchEngine(model, seed=3)
    before = responses(engine)
    plan = plan_reshard(model.spec, TRAIN, Layout(), dtype="float32", forms=(megatron, separate))
    shards = shards_of(plan, shard(model.spec, TRAIN, megatron, make_model(2, **ENGINE).weights))
    with pytest.raises(RuntimeError, match="version 0 stays"):
        reshard_in_process(shards, version=1, wire=zeros)
    assert engine.version == 0
    for now, then in zip(responses(engine), before, strict=True):
        assert torch.equal(now.logprobs, then.logprobs)
