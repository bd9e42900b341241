"""torch's default process group and megatron-core's groups, of one layout at a time."""

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlkit import device as devices
from rlkit.backends.megatron_cpu import seed
from rlkit.config import Layout


def open_groups(layout: Layout, context: Any, device: torch.device) -> None:
    """Make the groups of a layout on all its ranks, unless this process has them already.

    ``context`` is a worker's place: rank, size, collective, timeout.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    sizes, timeout_s = _sizes(layout), getattr(context, "timeout_s", 600.0)
    if parallel_state.model_parallel_is_initialized():
        _check_same(sizes)
        return
    if not dist.is_initialized():
        dist.init_process_group(
            devices.platform(device.type).collective,
            store=_store(context),
            rank=getattr(context, "rank", 0),
            world_size=layout.num_devices,
            timeout=timedelta(seconds=timeout_s),
        )
    if dist.get_world_size() != layout.num_devices:
        raise ValueError(
            f"MegatronBackend: got {dist.get_world_size()} ranks for {layout.short()}, need "
            f"{layout.num_devices}. Start as many processes as the layout has devices."
        )
    parallel_state.initialize_model_parallel(
        *sizes[:2],
        context_parallel_size=layout.cp,
        expert_model_parallel_size=sizes[2],
        expert_tensor_parallel_size=sizes[3],
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        order=layout.rank_order,
        create_gloo_process_groups=False,
    )
    seed()


def close_groups() -> None:
    """Forget all groups, so that others can be made."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast(tensor: Tensor, rank: int) -> None:
    """Overwrite a tensor with that of one rank of all."""
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast(tensor, src=rank)


def highest(tensor: Tensor, group: Any = None) -> Tensor:
    """Maximum over the ranks of a group, or all ranks, in place."""
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
    return tensor


def any_rank(value: bool, device: torch.device) -> bool:
    """Whether it is so on any rank."""
    return bool(highest(torch.tensor(float(value), device=device)))


def from_last_stage(value: list[Any]) -> list[Any]:
    """The last pipeline stage's list, on every stage."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    last, found = parallel_state.get_pipeline_model_parallel_last_rank(), [value]
    torch.distributed.broadcast_object_list(found, src=last, group=group)
    return found[0]


def _sizes(layout: Layout) -> tuple[int, int, int, int]:
    return layout.tp, layout.pp, layout.ep, layout.tp_of_experts


def _check_same(sizes: tuple[int, int, int, int]) -> None:
    from megatron.core import parallel_state as state

    there = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
    )
    if there != sizes:
        raise ValueError(
            f"MegatronBackend: got tp, pp, ep, expert_tp = {sizes} in a process that has groups of "
            f"{there}; need one layout a process. Spawn the worker in a group of its own."
        )


def _store(context: Any) -> Any:
    """Where the ranks meet: the store of the worker's collective, or none of its own for one."""
    import torch.distributed as dist

    collective = getattr(context, "collective", None)
    if collective is None:
        return dist.HashStore()
    return dist.PrefixStore("megatron", collective.store)
