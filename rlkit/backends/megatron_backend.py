"""MegatronBackend: forward, backward and AdamW of a model that megatron-core cuts over ranks.

Tensor parallelism (with sequence parallelism), context, pipeline, expert and data parallelism. All
ranks of a model call the same methods in the same order. Losses run on the last pipeline stage, on
full rows, and alike on tensor- and context-parallel peers; what they say goes to every stage.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlkit import device as devices
from rlkit.backends import megatron_cpu
from rlkit.backends.context_parallel import Part
from rlkit.backends.losses import Guarded, wants_entropy
from rlkit.backends.megatron_groups import close_groups, from_last_stage
from rlkit.backends.megatron_model import MegatronOptions, check_model
from rlkit.backends.megatron_optimizer import (
    MOMENTS,
    bytes_held,
    gradient_buffers,
    make_optimizer,
    moments,
    reduced_norm,
    set_moments,
    update,
)
from rlkit.backends.megatron_stage import Stage
from rlkit.backends.megatron_weights import Weights
from rlkit.backends.ranks import broadcast, check_same_steps, together
from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.checks import finite, switches
from rlkit.config import Layout, OptimConfig
from rlkit.models.decoder import Decoder
from rlkit.models.pretrained import Pretrained
from rlkit.reshard.plan_forms import megatron
from rlkit.types import LossFn

logger = logging.getLogger("rlkit.backends")


def on_device(method: Any) -> Any:
    """Run a method with what megatron-core misses on a CPU."""

    @functools.wraps(method)
    def patched(self: "MegatronBackend", *args: Any, **kwargs: Any) -> Any:
        with megatron_cpu.patches(self.device):
            return method(self, *args, **kwargs)

    return patched


class MegatronBackend:
    """Trains a policy cut over the ranks of ``context.layout``; the same numbers as TorchBackend.

    ``functools.partial(rk.MegatronBackend, options=rk.MegatronOptions(...))`` passes options
    through ``spawn``.
    """

    form = staticmethod(megatron)
    """Which tensors a rank makes of its rows: a resharder's plan starts from ``shards``."""

    def __init__(
        self,
        model: Pretrained,
        *,
        device: torch.device | str = "cpu",
        lr: float = 1e-6,
        optim: OptimConfig | None = None,
        context: Any = None,
        options: MegatronOptions | None = None,
    ) -> None:
        finite("lr", lr)
        if model.module is not Decoder:
            raise ValueError(
                "MegatronBackend: got a critic, need a policy. Leave backend= out of the critic's "
                "spawn: TorchBackend trains critics."
            )
        self.device, self.lr, self.optim = torch.device(device), lr, optim or OptimConfig()
        self.layout: Layout = getattr(context, "layout", Layout(dp=1))
        self.spec = model.spec
        self.options = switches("MegatronBackend", options, MegatronOptions)
        self.num_steps, self._peers = 0, getattr(context, "collective", None)
        check_model(self.spec, self.layout, self.options, kind=self.device.type)
        megatron_cpu.prepare(self.device)
        self._build(context)
        self.load_state_dict(model.weights)

    @on_device
    def _build(self, context: Any) -> None:
        """Groups, model and optimizer, weights not set."""
        # First: its tables say what is wrong with a layout that doesn't divide the model.
        self._weights = Weights(self.spec, self.layout, getattr(context, "rank", 0))
        self.stage = Stage(
            self.spec, self.layout, self.options, device=self.device, context=context
        )
        self.optimizer = make_optimizer(self.stage.model, self.optim, self.options)
        self._tensors = dict(self.stage.module.named_parameters())
        self._weights.check(self._tensors)

    # ---- forward and backward ----

    def forward(self, batch: Batch, *, entropy: bool = False) -> tuple[Rows, Rows | None]:
        """``forward_all`` of one batch."""
        return self.forward_all([batch], entropy=entropy)[0]

    @together
    @on_device
    def forward_all(
        self, batches: Sequence[Batch], *, entropy: bool = False
    ) -> list[tuple[Rows, Rows | None]]:
        """Logprobs, and entropies if asked for, of the response tokens of each batch, unpadded, in
        host memory, on every rank.
        """

        def use(batch: Batch | None, part: Part, hidden: Tensor) -> tuple[Tensor, ...]:
            found = self.stage.per_token(hidden, part, entropy=entropy)
            return tuple(each.cpu() for each in found)

        with torch.no_grad():
            kept = from_last_stage(self.stage.run(batches, use, train=False))
        lengths = [batch._column("response_ids").load(batch.uids).row_lengths for batch in batches]
        return [
            (Rows(found, num), Rows(more, num) if entropy else None)
            for (found, more), num in zip(kept, lengths, strict=True)
        ]

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, Tensor]:
        """``forward_backward_all`` of one micro-batch."""
        return self.forward_backward_all([batch], loss_fn)[0]

    @together
    @on_device
    def forward_backward_all(
        self, batches: Sequence[Batch], loss_fn: LossFn
    ) -> list[dict[str, Tensor]]:
        """Add the gradients of micro-batches, one forward and one backward at a time on each stage.

        Returns each one's share of metrics and ``loss``, on every rank. An error in the loss is
        raised when all ranks have ended the schedule, here or, on ranks without it, as a PeerError.
        """
        wanted, guarded = wants_entropy(loss_fn), Guarded(loss_fn)

        def use(batch: Batch | None, part: Part, hidden: Tensor) -> tuple[Tensor, Any, Any]:
            logprobs, entropies = self.stage.per_token(hidden, part, entropy=wanted)
            loss, metrics = guarded(batch, part.packed, logprobs, entropies)
            return loss, torch.zeros((), dtype=torch.int), devices.to_host(metrics)

        kept = self.stage.run(batches, use, train=True)
        guarded.raise_on_all(self)
        return from_last_stage(kept)

    # ---- the optimizer ----

    @together
    @on_device
    def step(self) -> dict[str, float]:
        """One AdamW step on the gradients summed over micro-batches and ranks, clipped by their
        norm over all ranks, each weight counted once.

        A norm that is not finite leaves the weights alone and is counted.
        """
        norm = reduced_norm(self.stage.model, self.optimizer)
        rate = self.lr * self.optim.lr_schedule(self.num_steps)
        if math.isfinite(norm):
            most = self.optim.max_grad_norm
            update(self.optimizer, rate=rate, norm=norm, max_norm=most)
            self.num_steps += 1
        else:
            logger.warning("gradient norm is %s: optimizer step skipped, weights unchanged", norm)
        self.zero_grad()
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(not math.isfinite(norm))}

    def zero_grad(self) -> None:
        """Forget gradients, those of an interrupted step for instance."""
        self.stage.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    @on_device
    def resync(self, peers: Any, *, version: int) -> int:
        """After a call failed: go on if all ranks have made the same steps; returns rank 0's
        version.
        """
        self.zero_grad()
        return check_same_steps(peers, self.num_steps, version, rank=self._weights.rank)

    # ---- weights ----

    @property
    def shards(self) -> dict[str, Tensor]:
        """This rank's tensors, as the form ``rlkit.reshard.megatron`` names them; not copied."""
        return dict(self._tensors)

    def resident(self) -> dict[str, Tensor]:
        """What stays on the device between calls, not copied: this rank's weights and moments, and
        the buffers of gradients.
        """
        held = moments(self.stage.module, self.optimizer).items()
        kept = {f"{what}/{name}": state[what] for name, state in held for what in MOMENTS}
        buffers = gradient_buffers(self.stage.model)
        return self.shards | kept | {f"gradients/{i}": each for i, each in enumerate(buffers)}

    @together
    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights by Hugging Face name, copies in host memory; all ranks call it."""
        return self._weights.gather(self._tensors, broadcast)

    @on_device
    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; the optimizer's moments stay."""
        self._weights.spread(weights, self._tensors)
        self.optimizer.reload_model_params()

    def optimizer_state(self) -> dict[str, Tensor]:
        """What AdamW keeps of each whole weight, as ``what/weight``, as TorchBackend has it; all
        ranks call it.
        """
        self._check_moments_whole()
        return self._whole_moments()

    @together
    def _whole_moments(self) -> dict[str, Tensor]:
        held = moments(self.stage.module, self.optimizer)
        if not self.num_steps:
            return {}
        found = {}
        for what in MOMENTS:
            tensors = {name: state[what] for name, state in held.items()}
            whole = self._weights.gather(tensors, broadcast)
            found |= {f"{what}/{name}": value for name, value in whole.items()}
        names, steps = [*self._weights.shapes], float(self.num_steps)
        return found | {f"step/{name}": torch.tensor(steps) for name in names}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Put ``optimizer_state``, of any layout or of TorchBackend, back.

        ValueError, before anything is changed, for moments of weights that this model hasn't.
        """
        self._check_moments_whole()
        found: dict[str, dict[str, Tensor]] = {}
        steps = max((int(v) for k, v in tensors.items() if k.startswith("step/")), default=0)
        for what in MOMENTS if tensors else ():
            whole = {k.partition("/")[2]: v for k, v in tensors.items() if k.startswith(f"{what}/")}
            found[what] = {name: torch.zeros_like(t) for name, t in self._tensors.items()}
            self._weights.spread(whole, found[what])
        set_moments(self.stage.module, self.optimizer, found, steps=steps)
        self.num_steps = num_steps

    def _check_moments_whole(self) -> None:
        if self.options.distributed_optimizer:
            raise ValueError(
                "MegatronBackend: got a checkpoint's moments with distributed_optimizer=True, need "
                "moments that each rank has of its own weights. Leave distributed_optimizer out."
            )

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and moments."""
        return bytes_held(self._tensors, self.stage.model, self.optimizer)

    def close(self) -> None:
        """Forget the process groups, so that another layout may have them."""
        close_groups()
