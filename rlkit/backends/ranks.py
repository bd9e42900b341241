"""What backends share that cut a model over processes: torch's default process group, and calls
that all ranks make together.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlkit import device as devices
from rlkit.checks import PeerError
from rlkit.config import Layout
from rlkit.shield import shield

RESPAWN = "Start them again: cluster.respawn(group), then load the last checkpoint."
ALIKE_S = 5.0
"""How much later another rank may have the same error."""


@contextmanager
def meeting(peers: Any) -> Iterator[None]:
    """Begin when all ranks are there, and let nothing interrupt what is inside.

    Collectives inside can't be stopped: a rank that went alone, while another failed before or was
    interrupted, would wait for it in vain. The barrier of ``peers``, the worker's collective, can,
    when the others had time to come: a rank that leaves it while they enter would be missed inside.

    After an error inside that not all ranks have, alike or told (``Guarded``), the others wait for
    this one until they time out, and the groups can't be used again: later calls say so.
    """
    with shield:
        if not torch.distributed.is_initialized():
            raise RuntimeError(f"backend: got a model whose ranks lost each other. {RESPAWN}")
        if peers is not None:
            peers.barrier()
        try:
            yield
        except Exception as error:
            if getattr(error, "__rlkit_told__", False) or peers is None or peers.all_come(ALIKE_S):
                raise
            close_world()
            if "gloo" in str(error) or isinstance(error, torch.distributed.DistError):
                what = str(error).splitlines()[0]
                raise PeerError(
                    f"backend: a rank failed or died meanwhile. {RESPAWN} ({what})"
                ) from error
            error.add_note(f"Other ranks of the model waited for this one. {RESPAWN}")
            raise


def together(method: Any) -> Any:
    """``meeting`` around a backend's method."""

    @functools.wraps(method)
    def met(self: Any, *args: Any, **kwargs: Any) -> Any:
        with meeting(self._peers):
            return method(self, *args, **kwargs)

    return met


def open_world(layout: Layout, context: Any, device: torch.device) -> None:
    """Make torch's default process group of a layout's ranks, unless this process has it already.

    ``context`` is a worker's place: rank, collective, timeout.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            devices.platform(device.type).collective,
            store=_store(context),
            rank=getattr(context, "rank", 0),
            world_size=layout.num_devices,
            timeout=timedelta(seconds=getattr(context, "timeout_s", 600.0)),
        )
    if dist.get_world_size() != layout.num_devices:
        raise ValueError(
            f"backend: got {dist.get_world_size()} ranks for {layout.short()}, need "
            f"{layout.num_devices}. Start as many processes as the layout has devices."
        )


def close_world() -> None:
    """Forget the default process group and all others, so that they can be made anew."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


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


def check_same_steps(peers: Any, num_steps: int, version: int, *, rank: int) -> int:
    """After a call failed: rank 0's version, if all ranks have made the same optimizer steps.

    A rank's part of a cut model is nowhere else, so ranks that differ can't be mended.
    """
    facts = torch.tensor([num_steps, version])
    peers.broadcast_(facts, root=0)
    behind = torch.tensor([float(num_steps != facts[0])])
    peers.sum_(behind)
    if behind:
        raise RuntimeError(
            f"backend: rank {rank} made {num_steps} optimizer steps, rank 0 {int(facts[0])}, when "
            "a call failed; need equal numbers. cluster.respawn(group), then load the last "
            "checkpoint."
        )
    return int(facts[1])


def _store(context: Any) -> Any:
    """Where the ranks meet: the store of the worker's collective, or one of its own for one."""
    import torch.distributed as dist

    collective = getattr(context, "collective", None)
    if collective is None:
        return dist.HashStore()
    return dist.PrefixStore("backend", collective.store)
