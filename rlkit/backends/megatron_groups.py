"""megatron-core's process groups, of one layout at a time."""

from typing import Any

import torch

from rlkit.backends.megatron_cpu import seed
from rlkit.backends.ranks import close_world, open_world
from rlkit.config import Layout


def open_groups(layout: Layout, context: Any, device: torch.device) -> None:
    """Make the groups of a layout on all its ranks, unless this process has them already.

    ``context`` is a worker's place: rank, size, collective, timeout.
    """
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        _check_same(layout)
        return
    timeout_s = getattr(context, "timeout_s", 600.0)
    open_world(layout, context, device)
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.tp_of_experts,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]
        order=layout.rank_order,
        create_gloo_process_groups=False,
    )
    seed()


def close_groups() -> None:
    """Forget all groups, so that others can be made."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    close_world()


def from_last_stage(value: list[Any]) -> list[Any]:
    """The last pipeline stage's list, on every stage."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    last, found = parallel_state.get_pipeline_model_parallel_last_rank(), [value]
    torch.distributed.broadcast_object_list(found, src=last, group=group)
    return found[0]


def _check_same(layout: Layout) -> None:
    from megatron.core import parallel_state as state

    sizes = layout.tp, layout.pp, layout.cp, layout.ep, layout.tp_of_experts
    there = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
    )
    if there != sizes:
        raise ValueError(
            f"MegatronBackend: got tp, pp, cp, ep, expert_tp = {sizes} in a process with groups "
            f"of {there}; need one layout a process. Spawn the worker in a group of its own."
        )
