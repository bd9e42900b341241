"""A decoder over the ranks of a layout: DTensors of torch's tensor parallelism, FSDP2's shards.

Tensor parallelism cuts matrices as Megatron does (1909.08053), sequence parallelism the residual
stream between them along the tokens (2205.05198); FSDP2 spreads what is left over data-parallel
ranks (2304.11277). Gradients are added up over ranks, never averaged.
"""

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlkit.algo.logprobs import in_pieces, rows_at_once
from rlkit.backends.packing import Packed
from rlkit.backends.ranks import close_world, highest, meeting, open_world
from rlkit.backends.torch_options import TorchOptions
from rlkit.backends.vocab_parallel import Ranks, logprobs_and_entropy
from rlkit.config import Layout
from rlkit.models.decoder import Critic, Decoder


class Parallel:
    """A decoder's parameters as DTensors on a mesh [dp, tp], and what ranks do together."""

    def __init__(
        self,
        decoder: Decoder,
        layout: Layout,
        options: TorchOptions,
        *,
        device: torch.device,
        context: Any,
    ) -> None:
        open_world(layout, context, device)
        place = layout.coordinates()
        ranks = np.empty((layout.num_devices // layout.tp, layout.tp), dtype=np.int64)
        ranks[place["dp"], place["tp"]] = np.arange(layout.num_devices)
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("dp", "tp"))
        self.decoder, self.options, self.device = decoder, options, device
        self.tp, self.dp = mesh["tp"], mesh["dp"]
        self.multiple = layout.tp if options.sequence_parallel else 1
        self._peers = getattr(context, "collective", None)
        if layout.tp > 1:
            cut_tensors(decoder, self.tp, sequence_parallel=options.sequence_parallel)
        if options.fully_shard:
            shard_fully(decoder, self.dp)

    # ---- what ranks do together ----

    def together(self) -> AbstractContextManager[None]:
        """Around what all ranks do at the same time."""
        return meeting(self._peers)

    def num_in_step(self, num: int) -> int:
        """Micro-batches to run: FSDP2's shards are gathered equally often by all ranks."""
        if not self.options.fully_shard:
            return num
        return int(highest(torch.tensor(num, device=self.device)))

    def per_token(self, hidden: Tensor, packed: Packed, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """``Decoder.per_token`` of hidden states [M, hidden]; no rank has a whole row of logits."""
        targets, temperature = packed.targets.tensor, packed.temperature
        if self.tp.size() == 1 or isinstance(self.decoder, Critic):
            return self.decoder.per_token(hidden, targets, temperature, entropy=entropy)
        vocab_size = self.decoder.spec.vocab_size
        columns = -(-vocab_size // self.tp.size())  # the last rank may have fewer
        ranks = Ranks(
            first=self.tp.get_local_rank() * columns,
            vocab_size=vocab_size,
            total=lambda x: self._reduced(x, Partial("sum")),
            highest=lambda x: self._reduced(x, Partial("max")),
        )

        def piece(hidden: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.decoder.logits(hidden)  # [n, columns]
            return logprobs_and_entropy(logits, targets, temperature, ranks, entropy=entropy)

        return in_pieces(piece, hidden, targets, temperature, num_rows=rows_at_once(columns))

    def _reduced(self, x: Tensor, kind: Placement) -> Tensor:
        return DTensor.from_local(x, self.tp, [kind], run_check=False).full_tensor()

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients summed over ranks, cut as their parameters; FSDP2 has summed its own."""
        for p in parameters:
            # On cut tokens or heads a norm's gradient is this rank's share, Partial, until here.
            p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        if not self.options.fully_shard and self.dp.size() > 1:
            own = [self.local(p.grad) for p in parameters if p.grad is not None]
            flat = torch.cat([grad.reshape(-1) for grad in own])
            torch.distributed.all_reduce(flat, group=self.dp.get_group())
            for grad, piece in zip(own, flat.split([g.numel() for g in own]), strict=True):
                grad.copy_(piece.view_as(grad))

    def forget_whole(self) -> None:
        """Free what a forward pass without a backward gathered of the outermost weights."""
        if isinstance(self.decoder, FSDPModule):
            self.decoder.reshard()

    def close(self) -> None:
        """Forget the process groups."""
        close_world()

    # ---- tensors: whole, this rank's ----

    def local(self, tensor: Any) -> Tensor:
        """What of a tensor lies on this rank, not copied."""
        held = tensor.detach()
        return held.to_local() if isinstance(held, DTensor) else held

    def whole(self, tensor: Any) -> Tensor:
        """All of a tensor; all ranks call it."""
        held = tensor.detach()
        return held.full_tensor() if isinstance(held, DTensor) else held

    def of_tp(self, tensor: Any) -> Tensor:
        """This rank's tensor-parallel part, gathered if data-parallel ranks share it; of a
        vocabulary that tp does not divide with rows of padding, as a form has it.
        """
        held = tensor.detach()
        if not isinstance(held, DTensor):
            return held
        names = held.device_mesh.mesh_dim_names or ()
        kept = [
            Replicate() if name == "dp" else placement
            for name, placement in zip(names, held.placements, strict=True)
        ]
        mine = held.redistribute(placements=kept).to_local()
        cut = any(placement == Shard(0) for placement in kept)
        missing = -(-len(tensor) // self.tp.size()) - len(mine) if cut else 0
        return torch.cat([mine, mine.new_zeros(missing, *mine.shape[1:])]) if missing > 0 else mine

    def cut_like(self, like: Tensor, tensor: Tensor) -> Tensor:
        """A whole tensor, cut as another is."""
        if not isinstance(like, DTensor):
            return tensor
        return distribute_tensor(
            tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
        )


def cut_tensors(decoder: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cut a decoder's matrices over tensor-parallel ranks; norms are on all of them."""
    stream = Shard(0) if sequence_parallel else Replicate()  # of [N, hidden] between the parts
    norm = SequenceParallel(sequence_dim=0, use_local_output=True) if sequence_parallel else Same()
    rest = (None, None, None)  # rope, layer, attend
    block: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": PrepareModuleInput(
            input_layouts=(stream, *rest), desired_input_layouts=(Replicate(), *rest)
        ),
        "self_attn.[qkv]_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=stream),
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(
            input_layouts=(stream,), desired_input_layouts=(Replicate(),)
        ),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=stream),
    }  # fmt: skip
    if decoder.spec.qk_norm:  # of [N, heads, head_dim]: each rank has its heads
        block["self_attn.[qk]_norm"] = SequenceParallel(sequence_dim=1, use_local_output=True)
    critic = isinstance(decoder, Critic)
    plan = {f"model.layers.*.{name}": style for name, style in block.items()} | {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.norm": norm,
        "value_head" if critic else "lm_head": Same() if critic else ColwiseParallel(),
    }
    parallelize_module(decoder, mesh, plan, src_data_rank=None)
    if sequence_parallel:
        whole = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
        parallelize_module(decoder, mesh, whole)
    if not critic:
        decoder.tie()


class Same(ParallelStyle):
    """A module with the same weights, input and output on all tensor-parallel ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, args: Any, mesh: DeviceMesh) -> Any:
            return DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def shard_fully(decoder: Decoder, mesh: DeviceMesh) -> None:
    """FSDP2: one group of weights a block, one of all else; gradients are sums over ranks."""
    # Nothing changes hidden states in place; a norm and whole weights may take two collectives.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for block in decoder.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(decoder, mesh=mesh)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo scales nothing on the way
