"""Plans between layouts: what moves, how much, and what devices hold meanwhile."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from layouts import cases
from toys import FAMILIES

import rlkit as rk
from rlkit.config import Layout, ModelSpec
from rlkit.reshard import (
    allgather_swap,
    direct,
    megatron,
    naive,
    parameters,
    plan_reshard,
    separate,
    vllm,
)

STRATEGIES = (naive, allgather_swap, direct)
LLAMA = FAMILIES["llama"]


def unpadded(plan) -> np.ndarray:
    """Bytes of each generation rank, padding of the vocabulary left out."""
    side = plan.cut.infer
    return side.nbytes([p for p in plan.cut.table if not p.vocab])


@settings(max_examples=40)
@given(cases())
def test_every_piece_a_rank_needs_comes_once(case):
    model, train, infer, forms, devices = case
    for strategy in STRATEGIES:
        plan = plan_reshard(model, train, infer, devices=devices, forms=forms, strategy=strategy)
        found = np.zeros(devices, dtype=np.int64)
        for block in plan.blocks:
            if not block.parameter.vocab:
                nbytes = block.nbytes * block.needed * len(block.layers)
                np.add.at(found, block.target, nbytes)
        assert (found == unpadded(plan)).all()


@settings(max_examples=40)
@given(cases())
def test_direct_moves_least_and_naive_most_and_the_swap_has_the_lower_peak(case):
    model, train, infer, forms, devices = case
    plans = [
        plan_reshard(model, train, infer, devices=devices, forms=forms, strategy=strategy)
        for strategy in STRATEGIES
    ]
    assert plans[2].nbytes <= plans[1].nbytes <= plans[0].nbytes
    assert plans[1].peak_bytes() <= plans[0].peak_bytes()
    assert plans[1].residual_bytes() == 0


@settings(max_examples=20)
@given(cases())
def test_no_bucket_brings_a_rank_more_than_its_size(case):
    model, train, infer, forms, devices = case
    strategy = functools.partial(direct, bucket_mib=600 / 2**20)
    plan = plan_reshard(model, train, infer, devices=devices, forms=forms, strategy=strategy)
    moves = plan.moves
    far = moves.source != moves.target
    key = moves.bucket[far] * devices + moves.target[far]
    assert (np.bincount(key, moves.nbytes[far]) <= 600).all()


def test_a_plan_by_hand():
    """TP 2 to TP 1: each of two ranks lacks the half that the other has."""
    plan = plan_reshard(LLAMA, Layout(tp=2), Layout(), strategy=direct)
    cut = [p for p in parameters(LLAMA) if p.cut is not None]
    half = sum(int(np.prod(p.shape)) * len(p.instances) for p in cut)  # 2 bytes of half of them
    assert plan.totals() == {"copy": plan.totals()["copy"], "gather": 2 * half} | {
        "swap_out": 0, "swap_in": 0,
    }  # fmt: skip


def test_nothing_moves_between_equal_layouts():
    layout = Layout(tp=2, pp=2)
    assert plan_reshard(LLAMA, layout, layout, strategy=direct, forms=(vllm, vllm)).nbytes == 0


def test_by_default_a_plan_takes_the_fewest_devices_that_both_layouts_divide():
    plan = plan_reshard(LLAMA, Layout(tp=2, pp=2), Layout(tp=8))
    assert plan.cut.num_devices == 8
    assert plan.cut.train.layout.dp == 2


def test_senders_share_the_load():
    """Four copies of each training shard: each sends a quarter."""
    forms = separate, separate  # without the padding that gives rank 0 of a toy all of its rows
    plan = plan_reshard(LLAMA, Layout(tp=2, dp=4), Layout(), strategy=direct, forms=forms)
    frame = plan.frame()
    sent = frame[frame["phase"] == "gather"].groupby("source")["bytes"].sum()
    assert sent.max() == sent.min()


@pytest.mark.parametrize(
    ("model", "train", "infer", "gb"),
    [
        (ModelSpec.qwen25_7b(), Layout(tp=2, pp=2), Layout(), 3.8),
        (ModelSpec.qwen25_32b(), Layout(tp=4, pp=4), Layout(tp=2), 4.1),
    ],
)
def test_a_system_without_swap_keeps_one_training_shard_more(model, train, infer, gb):
    """W / (TP x PP) of bf16 weights; the stages with the embeddings have a little more."""
    plan = plan_reshard(model, train, infer, devices=16, strategy=naive)
    held = plan.memory().query("phase == 'generate' and part == 'training'")["bytes"]
    assert held.mean() / 1e9 == pytest.approx(gb, rel=0.01)
    assert plan.residual_bytes() == held.max()


def test_a_plan_for_671_billion_parameters_on_384_devices():
    """Pure arithmetic: it takes about a second."""
    model, infer = ModelSpec.deepseek_r1_671b(), Layout(tp=4, ep=128, expert_tp=1)
    train = Layout(tp=4, pp=12, ep=32, expert_tp=1)
    plans = [
        plan_reshard(model, train, infer, devices=384, strategy=strategy) for strategy in STRATEGIES
    ]
    assert plans[2].nbytes < plans[1].nbytes < plans[0].nbytes
    bytes_ = np.array([plan.peak_bytes() for plan in plans]) / 2**30
    assert bytes_.argmax() == 0
    frame = plans[2].frame()
    assert frame["bytes"].sum() == sum(plans[2].totals().values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_frame_has_the_totals(strategy):
    plan = plan_reshard(
        FAMILIES["qwen3 moe"], Layout(tp=2, pp=2), Layout(tp=4, ep=2), strategy=strategy
    )
    by_phase = plan.frame().groupby("phase", observed=False)["bytes"].sum()
    assert by_phase.to_dict() == plan.totals()


def test_the_map_says_who_holds_what():
    plan = plan_reshard(LLAMA, Layout(tp=2, pp=2), Layout(tp=4), forms=(megatron, separate))
    found = plan.map("model.layers.3.self_attn.v_proj.weight")
    train = found[found["side"] == "train"]
    assert train["rank"].unique().tolist() == [2, 3]
    assert train["slice"].tolist() == ["[0:2, :]", "[2:4, :]", "[4:6, :]", "[6:8, :]"]
    assert set(train["stored_in"]) == {"decoder.layers.1.self_attention.linear_qkv.weight"}
    assert train["stored_at"].tolist() == [
        6,
        14,
        6,
        14,
    ]  # behind 2 queries and a key of 2 rows each
    infer = found[found["side"] == "infer"]
    assert infer["slice"].tolist() == ["[0:2, :]", "[2:4, :]", "[4:6, :]", "[6:8, :]"]


def test_the_map_names_experts():
    plan = plan_reshard(FAMILIES["qwen3 moe"], Layout(ep=2), Layout(ep=4))
    found = plan.map("model.layers.0.mlp.experts.*.up_proj.weight")
    assert found.loc[found["side"] == "infer", "slice"].iloc[1] == "[2:4, 0:8, :]"


def test_a_tensor_that_is_not_there_is_an_error_with_examples():
    plan = plan_reshard(LLAMA, Layout(tp=2), Layout())
    with pytest.raises(ValueError, match=r"got 'q_proj', need the name .*model\.embed_tokens"):
        plan.map("q_proj")
    plan = plan_reshard(FAMILIES["qwen3 moe"], Layout(ep=2), Layout(ep=4))
    with pytest.raises(ValueError, match=r"the number. Did you mean 'model.*experts\.\*\.up_proj"):
        plan.map("model.layers.0.mlp.experts.3.up_proj.weight")


def test_on_disjoint_devices_everything_travels():
    plan = plan_reshard(LLAMA, Layout(tp=2), Layout(), devices=(2, 3), strategy=direct)
    assert plan.totals()["copy"] == 0
    assert set(plan.moves.target.tolist()) == {2, 3, 4}
    assert set(plan.moves.source.tolist()) == {0, 1}
    assert plan.residual_bytes() == 0


def test_directs_peak_where_nothing_is_trained_is_generation_and_one_bucket():
    small = functools.partial(direct, bucket_mib=2048 / 2**20)
    plan = plan_reshard(LLAMA, Layout(tp=2), Layout(), devices=(2, 1), strategy=small)
    held = plan.memory().query("device == 2").set_index(["phase", "part"])["bytes"]
    assert held["gather", "generation"] == held["generate", "generation"] > 6 * 2048
    assert (held["gather", "training"], held["gather", "buffers"]) == (0, 2048)


def test_a_swap_on_disjoint_devices_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="disjoint devices, need both on the same ones: the swap"):
        plan_reshard(LLAMA, Layout(tp=2), Layout(), devices=(2, 1), strategy=allgather_swap)


@pytest.mark.parametrize(
    ("train", "infer", "message"),
    [
        (
            Layout(tp=3),
            Layout(),
            r"Layout\.tp: got 3 for .*q_proj.* of 8 heads, need a divisor of 8",
        ),
        (Layout(tp=16), Layout(), r"Layout\.tp: got 16"),
        (Layout(pp=5), Layout(), "got 5 stages for 4 layers"),
        (Layout(ep=2), Layout(), r"Layout\.ep: got 2, need 1: the model has no experts"),
        (Layout(pp=2, stages=(2, 3)), Layout(), "5 layers in all, need 4"),
        (Layout(dp=3), Layout(dp=2), "got dp=3, which takes 3 devices, on 6 devices"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_an_error(train, infer, message):
    with pytest.raises(ValueError, match=message):
        plan_reshard(LLAMA, train, infer)


def test_more_experts_places_than_experts_is_an_error():
    with pytest.raises(ValueError, match=r"Layout\.ep: got 3, need a divisor of the model's 8"):
        plan_reshard(FAMILIES["qwen3 moe"], Layout(ep=3), Layout())


def test_a_bucket_below_two_rows_is_an_error():
    with pytest.raises(ValueError, match="need at least twice a row of"):
        plan_reshard(
            LLAMA, Layout(tp=2), Layout(), strategy=functools.partial(direct, bucket_mib=4e-6)
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "qwen"}, "model: got 'qwen', need rk.ModelSpec"),
        ({"train": "tp2"}, r"train: got 'tp2', need rk.Layout\(tp=2\)"),
        ({"strategy": "naive"}, "strategy: got 'naive', need a function: rk.reshard.naive"),
        ({"strategy": lambda: None}, r"strategy: got <lambda>\(\), need a function of \(cut\)"),
        ({"strategy": lambda cut: 3}, "strategy's plan: got 3, need a ReshardPlan"),
        ({"strategy": functools.partial(direct, bucket_mib="64")}, "bucket_mib: got '64', need"),
        ({"forms": (megatron, "vllm")}, "forms: got 'vllm', need a function of"),
    ],
)
def test_a_name_in_place_of_a_part_is_named(wrong, message):
    parts = {"model": LLAMA, "train": Layout(tp=2), "infer": Layout()} | wrong
    with pytest.raises(TypeError, match=message):
        plan_reshard(**parts)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": functools.partial(naive, bucket_mib=math.inf)}, "bucket_mib: got inf, need"),
        ({"devices": (2, 2, 2)}, r"devices: got \(2, 2, 2\), need a number, or a pair"),
        ({"forms": megatron}, "forms: got <function megatron .*, need a pair"),
        ({"dtype": torch.bfloat16}, "dtype: got torch.bfloat16, need torch's name"),
    ],
)
def test_a_value_that_no_plan_has_is_named(wrong, message):
    parts = {"model": LLAMA, "train": Layout(cp=2), "infer": Layout()} | wrong
    with pytest.raises(ValueError, match=message):
        plan_reshard(**parts)


def test_a_dtype_that_torch_has_not_is_an_error():
    with pytest.raises(ValueError, match="dtype: got 'fp8', need torch's name of one"):
        plan_reshard(LLAMA, Layout(tp=2), Layout(), dtype="fp8")


def test_a_strategy_of_ones_own_is_a_function():
    def whole_to_all(cut):
        return rk.reshard.ReshardPlan(cut, "mine", cut.blocks(lambda held, needed: needed))

    plan = rk.plan_reshard(LLAMA, Layout(tp=2), Layout(), strategy=whole_to_all)
    assert plan.strategy == "mine"
    assert "mine, TP2 to DP2 on 2 devices" in plan._repr_html_()


def test_memory_of_a_plan_can_be_drawn():
    from rlkit.reshard.memory import by_phase

    plan = plan_reshard(ModelSpec.qwen25_7b(), Layout(tp=2, pp=2), Layout(), devices=16)
    axes = rk.viz.plot_memory(by_phase(plan), limit_gib=64, source="simulated")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        "train", "gather", "generate", "restore",
    ]  # fmt: skip
