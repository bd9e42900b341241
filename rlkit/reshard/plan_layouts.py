"""``plan_reshard``: from two layouts to what moves between them. Pure arithmetic."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlkit.checks import fits, instance, need
from rlkit.config import Layout, ModelSpec
from rlkit.reshard.plan_cells import Cut
from rlkit.reshard.plan_forms import Form, megatron, vllm
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_ranks import Side
from rlkit.reshard.plan_strategies import allgather_swap, check_strategy
from rlkit.reshard.plan_tables import parameters

MakeForm = Callable[[ModelSpec, Layout], Form]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """How the ranks of a worker group hold a model: one side of a plan."""

    model: ModelSpec
    layout: Layout
    form: MakeForm
    dtype: str
    """torch's name of it."""


def plan_between(
    source: Held,
    target: Held,
    *,
    devices: int | tuple[int, int],
    strategy: Callable[[Cut], ReshardPlan],
) -> ReshardPlan:
    """``plan_reshard`` from what the workers of two groups hold, which must be the same model."""
    here, there = ({p.name: p.shape for p in parameters(x.model)} for x in (source, target))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            got = [side.get(name, "missing") for side in (here, there)]
            raise ValueError(
                f"reshard: {name.format(layer='*', expert='*')} is {got[0]} at the source and "
                f"{got[1]} at the target; need the same model on both sides."
            )
    return plan_reshard(
        source.model,
        source.layout,
        target.layout,
        devices=devices,
        strategy=strategy,
        forms=(source.form, target.form),
        dtype=source.dtype,
    )


def plan_reshard(
    model: ModelSpec,
    train: Layout,
    infer: Layout,
    *,
    devices: int | tuple[int, int] | None = None,
    strategy: Callable[[Cut], ReshardPlan] = allgather_swap,
    forms: tuple[MakeForm, MakeForm] = (megatron, vllm),
    dtype: str = "bfloat16",
) -> ReshardPlan:
    """What moves when a model goes from layout ``train`` to layout ``infer``.

    devices: how many both layouts share, by default the fewest that both divide; or a pair, for
    layouts on disjoint devices. strategy: here ``allgather_swap``, whereas ``rk.Resharder`` takes
    ``direct`` by itself. ``forms`` are the tensors of either side: ``megatron``, ``vllm`` or
    ``separate`` of ``rlkit.reshard``, or another function (model, layout) -> Form. dtype: torch's
    name of the weights' on both sides.
    """
    instance("model", model, ModelSpec, such_as="rk.ModelSpec.qwen25_32b(), say")
    for name, layout in (("train", train), ("infer", infer)):
        instance(name, layout, Layout, such_as="rk.Layout(tp=2)")
    check_strategy(strategy)
    need(
        isinstance(forms, tuple) and len(forms) == 2,
        f"forms: got {forms!r}, need a pair such as (rk.reshard.megatron, rk.reshard.vllm).",
    )
    for form in forms:
        fits("forms", form, "model", "layout")
    if devices is None:
        devices = math.lcm(train.num_devices, infer.num_devices)
    pair = devices if isinstance(devices, tuple) else (devices, devices)
    need(
        len(pair) == 2,
        f"devices: got {devices}, need a number, or a pair for layouts on disjoint devices.",
    )
    first_rank = pair[0] if isinstance(devices, tuple) else 0
    layouts = [layout.on(num) for layout, num in zip((train, infer), pair, strict=True)]
    table = parameters(model, dtype=dtype)
    sides = [
        Side(model, table, layout, form(model, layout), first_rank=first)
        for layout, form, first in zip(layouts, forms, (0, first_rank), strict=True)
    ]
    return instance("strategy's plan", strategy(Cut(table, *sides)), ReshardPlan)
