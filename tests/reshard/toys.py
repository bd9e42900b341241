"""Models of toy width of every family, with every element another, and the moves of a plan."""

import torch

from rlkit.config import LatentAttention, Layout, MixtureOfExperts, ModelSpec
from rlkit.reshard import Shards, plan_reshard, reshard_in_process, separate, shard
from rlkit.reshard.plan_ranks import Side
from rlkit.reshard.plan_tables import parameters

SIZES = {
    "vocab_size": 50,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 2,
}
MOE = MixtureOfExperts(num_experts=8, experts_per_token=2, intermediate_size=8)
FAMILIES = {
    "llama": ModelSpec(**SIZES),
    "qwen2": ModelSpec(**SIZES, qkv_bias=True),
    "qwen2 tied": ModelSpec(**SIZES, qkv_bias=True, tie_embeddings=True),
    "qwen3": ModelSpec(**SIZES, qk_norm=True),
    "qwen3 moe": ModelSpec(**SIZES, qk_norm=True, moe=MOE),
    "deepseek": ModelSpec(
        **SIZES | {"num_kv_heads": 8, "head_dim": 4},
        moe=MixtureOfExperts(
            num_experts=8, experts_per_token=2, intermediate_size=8, num_shared_experts=1,
            num_dense_layers=1, router_bias=True,
        ),
        mla=LatentAttention(q_lora_rank=6, kv_lora_rank=4, rope_head_dim=2, v_head_dim=2),
    ),
}  # fmt: skip


def whole(model: ModelSpec, *, dtype: str = "float32", seed: int = 0) -> dict[str, torch.Tensor]:
    """A model's tensors by Hugging Face name; no element is like another."""
    generator = torch.Generator().manual_seed(seed)
    table = parameters(model, dtype=dtype)
    side = Side(model, table, Layout(dp=1), separate(model, Layout()))
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, kind))
        for name, shape, kind in side.tensors(0)
    }


def shards_of(plan, states, **options) -> list[Shards]:
    """Shards of every device of a plan, from the states of the training ranks."""
    blank = [{}] * (plan.cut.num_devices - len(states))
    return [Shards(plan, rank, s, **options) for rank, s in enumerate([*states, *blank])]


def move(model, train, infer, states, *, version=1, check=True, **options):
    """(plan, shards, report) of a reshard in this process."""
    plan = plan_reshard(model, train, infer, dtype="float32", **options)
    shards = shards_of(plan, states)
    return plan, shards, reshard_in_process(shards, version=version, check=check)


def same(one, other) -> bool:
    """Equal names and equal bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def states_of(model, layout, form, *, seed=0, devices=None) -> list[dict[str, torch.Tensor]]:
    """What each rank of a layout holds of ``whole(model)``."""
    layout = layout.on(devices) if devices else layout
    return shard(model, layout, form, whole(model, seed=seed))
