"""Layouts for tests: any that divide the toys, and those of MindSpeed RL's configurations."""

import itertools
import math
from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st
from toys import FAMILIES, MOE, SIZES

from rlkit.config import Layout, ModelSpec
from rlkit.reshard import megatron, separate, vllm

FORMS = (megatron, vllm, separate)


@st.composite
def layouts(draw, model: ModelSpec, *, most: int = 8) -> Layout:
    """A layout that divides a toy and fits on ``most`` devices."""
    pp = draw(st.sampled_from([1, 1, 2, 3]))
    stages = None
    if draw(st.booleans()) and pp > 1:
        cuts = sorted(draw(st.permutations(range(1, model.num_layers)))[: pp - 1])
        edges = [0, *cuts, model.num_layers]
        stages = tuple(b - a for a, b in itertools.pairwise(edges))
    order = draw(st.permutations(["tp", "cp", "ep", "dp"]))
    layout = Layout(
        tp=draw(st.sampled_from([1, 2, 4, 8])),
        pp=pp,
        cp=draw(st.sampled_from([1, 1, 2])),
        ep=draw(st.sampled_from([1, 2, 4, 8])) if model.moe else 1,
        expert_tp=draw(st.sampled_from([None, 1, 2])) if model.moe else None,
        stages=stages,
        rank_order="-".join([*order, "pp"]),
    )
    assume(layout.unit <= most)
    return layout


@st.composite
def cases(draw):
    """(model, train, infer, forms, devices)."""
    model = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    train, infer = draw(layouts(model)), draw(layouts(model))
    devices = math.lcm(train.unit, infer.unit)
    assume(devices <= 16)
    return (
        model,
        train,
        infer,
        (draw(st.sampled_from(FORMS)), draw(st.sampled_from(FORMS))),
        devices,
    )


def _toy(num_layers: int, **more) -> ModelSpec:
    return ModelSpec(**SIZES | {"num_layers": num_layers, "num_kv_heads": 8} | more)


_EXPERTS = {"moe": MOE, "qk_norm": True}
_R1 = replace(
    FAMILIES["deepseek"], num_layers=13, moe=replace(FAMILIES["deepseek"].moe, num_experts=256)
)
SHEET = {
    "GRPO Qwen2.5-7B": (_toy(2), Layout(tp=2, pp=2), Layout(), 16),
    "GRPO Qwen2.5-32B A3": (
        _toy(8), Layout(tp=4, pp=4, stages=(2, 3, 2, 1)), Layout(tp=2), 16),
    "GRPO Qwen2.5-32B LoRA": (_toy(4), Layout(tp=4, pp=4), Layout(tp=4), 16),
    "DAPO Qwen3-30B-A3B": (
        _toy(2, **_EXPERTS), Layout(tp=4, ep=8, expert_tp=1), Layout(ep=8, expert_tp=1), 16),
    "DAPO Qwen3-32B": (_toy(2, qk_norm=True), Layout(tp=8, pp=2), Layout(tp=8), 16),
    "DAPO Qwen2.5-32B": (_toy(2), Layout(tp=8), Layout(tp=8), 16),
    "DAPO Qwen2.5-32B 32k": (_toy(2), Layout(tp=8, pp=2, cp=2), Layout(tp=4), 64),
    "DAPO Qwen2.5-7B multi-turn": (_toy(1), Layout(tp=4), Layout(), 8),
    "GRPO Qwen3-235B": (
        _toy(17, qk_norm=True, moe=replace(MOE, num_experts=32)),
        Layout(tp=2, pp=16, ep=8, expert_tp=1, stages=(1,) * 15 + (2,)),
        Layout(tp=4, ep=32, expert_tp=1), 128),
    "GRPO DeepSeek-R1 A3": (
        _R1, Layout(tp=4, pp=8, ep=32, expert_tp=1, stages=(1, 1, 2, 2, 2, 2, 2, 1)),
        Layout(tp=4, ep=256, expert_tp=1), 256),
}  # fmt: skip
"""(toy, train, infer, dies) of configs/ in MindSpeed RL's repository, widths and depths made small.

Experts as with moe_tp_extend_ep: tensor-parallel ranks serve as expert-parallel ones.
"""
