"""The resharding flow: weights from the training layout to the generation layout."""

from rlkit.reshard.plan_forms import megatron, separate, vllm
from rlkit.reshard.plan_layouts import Held, plan_reshard
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.plan_strategies import allgather_swap, direct, naive
from rlkit.reshard.plan_tables import parameters
from rlkit.reshard.report import ReshardReport
from rlkit.reshard.resharder import Resharder
from rlkit.reshard.run import reshard_in_process, reshard_over
from rlkit.reshard.shards import Shards, shard
from rlkit.reshard.swap import HostSwap

__all__ = [
    "Held",
    "HostSwap",
    "ReshardPlan",
    "ReshardReport",
    "Resharder",
    "Shards",
    "allgather_swap",
    "direct",
    "megatron",
    "naive",
    "parameters",
    "plan_reshard",
    "reshard_in_process",
    "reshard_over",
    "separate",
    "shard",
    "vllm",
]
