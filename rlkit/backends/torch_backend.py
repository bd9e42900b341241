"""TorchBackend: forward, backward and AdamW of a decoder or critic, whole on each rank or cut over
the ranks of a layout.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlkit.backends.losses import Guarded, evaluate, wants_entropy
from rlkit.backends.packing import Packed, filled, pack
from rlkit.backends.ranks import check_same_steps
from rlkit.backends.torch_copies import Copies
from rlkit.backends.torch_options import TorchOptions, check_layout
from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.checks import finite, switches
from rlkit.config import Layout, OptimConfig
from rlkit.models.attention import PackedAttention, positions
from rlkit.models.pretrained import Pretrained, check_weights, need_model
from rlkit.reshard.plan_forms import separate
from rlkit.shield import shield
from rlkit.trace import storage_bytes
from rlkit.types import LossFn

logger = logging.getLogger("rlkit.backends")


class TorchBackend:
    """Trains a decoder or a critic; ``context`` is the worker's place in the group's layout.

    Whole models on data-parallel ranks, unless the layout has a tp or the options cut them:
    ``backend=functools.partial(rk.TorchBackend, options=rk.TorchOptions(fully_shard=True))``. Then
    all ranks call the same methods in the same order.
    """

    form = staticmethod(separate)
    """Which tensors a rank makes of its rows: a resharder's plan starts from ``shards``."""

    def __init__(
        self,
        model: Pretrained,
        *,
        device: torch.device | str = "cpu",
        lr: float = 1e-6,
        optim: OptimConfig | None = None,
        context: Any = None,
        options: TorchOptions | None = None,
    ) -> None:
        finite("lr", lr)
        self.layout: Layout = getattr(context, "layout", Layout(dp=1))
        self.device, self.lr, self.optim = torch.device(device), lr, optim or OptimConfig()
        self.options, self.num_steps = switches("TorchBackend", options, TorchOptions), 0
        check_layout(need_model(model).spec, self.layout, self.options)
        self.decoder = model.build(device=device)
        self.decoder.recompute = self.options.recompute
        self.cut = self.layout.tp > 1 or self.options.fully_shard
        self._rank = getattr(context, "rank", 0)
        self._ranks = self._spread(context)
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(),
            lr=lr,
            betas=self.optim.betas,
            eps=self.optim.eps,
            weight_decay=self.optim.weight_decay,
            fused=self.device.type == "cpu" or None,  # one pass over them in place of ten
        )

    def _spread(self, context: Any) -> Any:
        """The decoder over the ranks: Copies, or Parallel, which has the same methods."""
        if not self.cut:
            return Copies(self.decoder, getattr(context, "collective", None))
        from rlkit.backends.torch_parallel import Parallel  # 0.7 s to import

        return Parallel(
            self.decoder, self.layout, self.options, device=self.device, context=context
        )

    # ---- forward and backward ----

    def forward(self, batch: Batch, *, entropy: bool = False) -> tuple[Rows, Rows | None]:
        """Logprobs (values of a critic), and entropies if asked for, of the response tokens of B
        rows, unpadded, in host memory.
        """
        return self.forward_all([batch], entropy=entropy)[0]

    def forward_all(
        self, batches: Sequence[Batch], *, entropy: bool = False
    ) -> list[tuple[Rows, Rows | None]]:
        """``forward`` of each batch."""
        kept, mine = [], list(map(self._packed, batches))  # its errors come before peers wait
        with self._ranks.together(), torch.no_grad():  # inference_mode's may enter no gradient
            for packed in self._in_step(mine):
                found, entropies = self._per_token(packed, entropy=entropy)
                lengths = packed.targets.lengths
                more = Rows(entropies.cpu(), lengths) if entropy else None
                kept.append((Rows(found.cpu(), lengths), more))
            self._ranks.forget_whole()
        return kept[: len(batches)]

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch's share of the loss.

        Returns its share of each metric, of the loss as ``loss``.
        """
        if self.cut:
            return self.forward_backward_all([batch], loss_fn)[0]
        packed = self._packed(batch)
        found, entropies = self._per_token(packed, entropy=wants_entropy(loss_fn))
        loss, metrics = evaluate(loss_fn, batch, packed, found, entropies)
        loss.backward()
        return metrics

    def forward_backward_all(
        self, batches: Sequence[Batch], loss_fn: LossFn
    ) -> list[dict[str, Tensor]]:
        """``forward_backward`` of each micro-batch of a step.

        Of a cut model an error in the loss is raised when all ranks have done their part, here or,
        on ranks without it, as a PeerError.
        """
        if not self.cut:
            return [self.forward_backward(batch, loss_fn) for batch in batches]
        kept, guarded, wanted = [], Guarded(loss_fn), wants_entropy(loss_fn)
        self.decoder.check_entropy(wanted=wanted)
        mine = list(map(self._packed, batches))
        with self._ranks.together():
            for batch, packed in zip_longest(batches, self._in_step(mine)):
                loss, metrics = guarded(batch, packed, *self._per_token(packed, entropy=wanted))
                loss.backward()
                kept.append(metrics)
            guarded.raise_on_all(self)
        return kept[: len(batches)]

    def _in_step(self, mine: list[Packed]) -> list[Packed]:
        """Micro-batches, and fillers up to as many as other ranks have, if all need as many."""
        missing = self._ranks.num_in_step(len(mine)) - len(mine)
        return [*mine, *(self._packed(None) for _ in range(missing))]

    def _packed(self, batch: Batch | None) -> Packed:
        packed = None if batch is None else pack(batch, device=self.device)
        if not self.cut:
            return packed  # type: ignore[return-value]
        return filled(packed, multiple=self._ranks.multiple, device=self.device)

    def _per_token(self, packed: Packed, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs or values [M], and entropies [M] (none unless asked for), packed."""
        attend = PackedAttention(packed.lengths)
        hidden = self.decoder(packed.ids, positions(packed.lengths), attend)
        return self._ranks.per_token(hidden[packed.predict], packed, entropy=entropy)

    # ---- the optimizer ----

    def step(self) -> dict[str, float]:
        """One AdamW step on the gradients summed over micro-batches and ranks, clipped by their
        global norm.

        A norm that is not finite leaves the weights alone and is counted.
        """
        with self._ranks.together():
            parameters = list(self.decoder.parameters())
            for p in parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self._ranks.add_up(parameters)
            total = get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = float(self._ranks.whole(total))
            if norm > self.optim.max_grad_norm:
                clip_grads_with_norm_(parameters, self.optim.max_grad_norm, total)
            rate = self.lr * self.optim.lr_schedule(self.num_steps)
            finite = norm == norm and norm != float("inf")
            if finite:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                with shield:  # weights and moments change whole or not at all
                    self.optimizer.step()
                    self.num_steps += 1
            else:
                logger.warning(
                    "gradient norm is %s: optimizer step skipped, weights unchanged", norm
                )
            self.zero_grad()
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(not finite)}

    def zero_grad(self) -> None:
        """Forget gradients, those of an interrupted step for instance."""
        self.optimizer.zero_grad(set_to_none=True)

    def resync(self, peers: Any, *, version: int) -> int:
        """Overwrite weights, moments and step count with rank 0's; returns rank 0's ``version``.

        Ranks of a cut model, which have nothing in common, go on if their step counts are equal.
        """
        self.zero_grad()
        if self.cut:
            return check_same_steps(peers, self.num_steps, version, rank=self._rank)
        facts = torch.tensor([self.num_steps, version, int(bool(self.optimizer.state))])
        peers.broadcast_(facts, root=0)
        self.num_steps, version, has_moments = facts.tolist()
        if not has_moments:
            self.optimizer.state.clear()
        for parameter in self.decoder.parameters():
            peers.broadcast_(parameter.data, root=0)
            if has_moments:
                state = self.optimizer.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    peers.broadcast_(state.setdefault(name, torch.zeros_like(parameter)), root=0)
                peers.broadcast_(state.setdefault("step", torch.zeros(())), root=0)
        return version

    # ---- weights and moments ----

    @property
    def shards(self) -> dict[str, Tensor]:
        """This rank's tensors, as the form ``rlkit.reshard.separate`` has them in the layout.

        FSDP2's are gathered: all ranks call it.
        """
        with self._ranks.together():
            return {name: self._ranks.of_tp(p) for name, p in self.decoder.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        """Whole weights by Hugging Face name, detached; gathered, if the model is cut, else not
        copied.
        """
        with self._ranks.together():
            return {name: self._ranks.whole(p) for name, p in self.decoder.named_parameters()}

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; the optimizer's moments stay."""
        own = dict(self.decoder.named_parameters())
        check_weights(own, weights, tied=self.decoder.spec.tie_embeddings)
        local, cut_like = self._ranks.local, self._ranks.cut_like
        with torch.no_grad():
            for name, parameter in own.items():
                local(parameter).copy_(local(cut_like(parameter, weights[name])))

    def optimizer_state(self) -> dict[str, Tensor]:
        """What AdamW keeps of each whole weight, as ``what/weight``; nothing before its first step.

        Gathered, if the model is cut, else not copied.
        """
        with self._ranks.together():
            return {key: self._ranks.whole(value) for key, value in self._moments().items()}

    def _moments(self) -> dict[str, Tensor]:
        return {
            f"{what}/{name}": value
            for name, parameter in self.decoder.named_parameters()
            for what, value in self.optimizer.state.get(parameter, {}).items()
        }

    def resident(self) -> dict[str, Tensor]:
        """What stays on the device between calls, not copied: this rank's weights and moments."""
        held = dict(self.decoder.named_parameters()) | self._moments()
        return {name: self._ranks.local(tensor) for name, tensor in held.items()}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Put ``optimizer_state``, of any layout, back, after ``num_steps`` steps of the learning
        rate's schedule.

        ValueError, before anything is changed, for moments of weights that this model hasn't.
        """
        own = dict(self.decoder.named_parameters())
        places = {name: i for i, name in enumerate(own)}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            what, _, name = key.partition("/")
            need = () if what == "step" or name not in own else tuple(own[name].shape)
            if name not in places or tuple(value.shape) != need:
                raise ValueError(
                    f"optimizer state: got {key} {tuple(value.shape)}, need {need} of a weight of "
                    "this model. Load a checkpoint of the same model."
                )
            mine = value if what == "step" else self._ranks.cut_like(own[name], value)
            state.setdefault(places[name], {})[what] = mine.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.num_steps = num_steps

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and moments."""
        parameters, local = list(self.decoder.parameters()), self._ranks.local
        return {
            "weights": storage_bytes(local(p) for p in parameters),
            "gradients": storage_bytes(local(p.grad) for p in parameters if p.grad is not None),
            "optimizer": storage_bytes(local(value) for value in self._moments().values()),
        }

    def close(self) -> None:
        """Forget the process groups of a cut model, so that another layout may have them."""
        self._ranks.close()
