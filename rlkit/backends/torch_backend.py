"""TorchBackend: forward, backward and AdamW of a decoder or critic on one device, gradients summed
over data-parallel ranks.
"""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlkit.backends.packing import Packed, pack
from rlkit.batch import Batch
from rlkit.checks import finite
from rlkit.config import Layout, OptimConfig
from rlkit.models.attention import PackedAttention, positions
from rlkit.models.pretrained import Pretrained, load_weights
from rlkit.rows import Rows
from rlkit.shield import shield
from rlkit.types import LossFn

logger = logging.getLogger("rlkit.backends")


class TorchBackend:
    """Trains a decoder or a critic; ``context`` is the worker's place among data-parallel ranks.

    ``recompute`` keeps only the input of each block, and computes what is in it a second time for
    the gradient: ``backend=functools.partial(TorchBackend, recompute=True)``.
    """

    def __init__(
        self,
        model: Pretrained,
        *,
        device: torch.device | str = "cpu",
        lr: float = 1e-6,
        optim: OptimConfig | None = None,
        context: Any = None,
        recompute: bool = False,
    ) -> None:
        finite("lr", lr)
        self.layout = getattr(context, "layout", Layout(dp=1)).whole("TorchBackend")
        self.device, self.lr, self.optim = torch.device(device), lr, optim or OptimConfig()
        self.decoder = model.build(device=device)
        self.decoder.recompute = recompute
        self.optimizer = torch.optim.AdamW(
            self.decoder.parameters(),
            lr=lr,
            betas=self.optim.betas,
            eps=self.optim.eps,
            weight_decay=self.optim.weight_decay,
        )
        self.num_steps = 0
        peers = getattr(context, "collective", None)
        self._reduce = None if peers is None else peers.sum_

    def forward(self, batch: Batch, *, entropy: bool = False) -> tuple[Rows, Rows | None]:
        """Logprobs (values of a critic), and entropies if asked for, of the response tokens of B
        rows, unpadded, in host memory.
        """
        with torch.no_grad():  # not inference_mode: what it makes may enter a gradient
            packed = pack(batch, device=self.device)
            found, entropies = self._per_token(packed, entropy=entropy)
            lengths = packed.targets.lengths
        return Rows(found.cpu(), lengths), Rows(entropies.cpu(), lengths) if entropy else None

    def forward_backward(self, batch: Batch, loss_fn: LossFn) -> dict[str, Tensor]:
        """Add the gradient of one micro-batch's share of the loss.

        Returns its share of each metric, of the loss as ``loss``.
        """
        packed = pack(batch, device=self.device)
        found, entropies = self._per_token(packed, entropy=wants_entropy(loss_fn))
        loss, metrics = evaluate(loss_fn, batch, packed, found, entropies)
        loss.backward()
        return metrics

    def _per_token(self, packed: Packed, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Logprobs or values [M], and entropies [M] (none unless asked for), packed."""
        attend = PackedAttention(packed.lengths)
        hidden = self.decoder(packed.ids, positions(packed.lengths), attend)
        return self.decoder.per_token(
            hidden[packed.predict], packed.targets.tensor, packed.temperature, entropy=entropy
        )

    def step(self) -> dict[str, float]:
        """One AdamW step on the gradients summed over micro-batches and ranks, clipped by their
        global norm.

        A norm that is not finite leaves the weights alone and is counted.
        """
        parameters = list(self.decoder.parameters())
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if self._reduce is not None:
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._reduce(flat)
            grads = [
                piece.view_as(p)
                for p, piece in zip(
                    parameters, flat.split([p.numel() for p in parameters]), strict=True
                )
            ]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.optim.max_grad_norm))
        rate = self.lr * self.optim.lr_schedule(self.num_steps)
        finite = norm == norm and norm != float("inf")
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            with shield:  # weights and moments change whole or not at all
                self.optimizer.step()
                self.num_steps += 1
        else:
            logger.warning("gradient norm is %s: optimizer step skipped, weights unchanged", norm)
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": rate, "skipped_steps": float(not finite)}

    def zero_grad(self) -> None:
        """Forget gradients, those of an interrupted step for instance."""
        self.optimizer.zero_grad(set_to_none=True)

    def resync(self, peers: Any, *, version: int) -> int:
        """Overwrite weights, moments and step count with rank 0's; returns rank 0's ``version``."""
        self.zero_grad()
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

    def state_dict(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name, detached, not copied."""
        return self.decoder.weights()

    def load_state_dict(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights; the optimizer's moments stay."""
        load_weights(self.decoder, weights)

    def optimizer_state(self) -> dict[str, Tensor]:
        """What AdamW keeps of each weight, as ``what/weight``, not copied; nothing before its first
        step.
        """
        return {
            f"{what}/{name}": value
            for name, parameter in self.decoder.named_parameters()
            for what, value in self.optimizer.state.get(parameter, {}).items()
        }

    def resident(self) -> dict[str, Tensor]:
        """What stays on the device between calls, not copied: weights and moments."""
        return {**self.state_dict(), **self.optimizer_state()}

    def load_optimizer_state(self, tensors: Mapping[str, Tensor], *, num_steps: int) -> None:
        """Put ``optimizer_state`` back, after ``num_steps`` steps of the learning rate's schedule.

        ValueError, before anything is changed, for moments of weights that this model hasn't.
        """
        places = {name: i for i, (name, _) in enumerate(self.decoder.named_parameters())}
        shapes = {name: p.shape for name, p in self.decoder.named_parameters()}
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            what, _, name = key.partition("/")
            need = () if what == "step" else tuple(shapes.get(name, ()))
            if name not in places or tuple(value.shape) != need:
                raise ValueError(
                    f"optimizer state: got {key} {tuple(value.shape)}, need {need} of a weight of "
                    "this model. Load a checkpoint of the same model."
                )
            state.setdefault(places[name], {})[what] = value.clone()
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.num_steps = num_steps


def wants_entropy(loss_fn: LossFn) -> bool:
    """Whether a loss has a parameter for the entropies."""
    return "entropy" in inspect.signature(loss_fn).parameters


def evaluate(
    loss_fn: LossFn, batch: Batch, packed: Packed, found: Tensor, entropies: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of one micro-batch and its metrics, with ``loss``, of packed values [M].

    Entropies are [M], too, for a loss that asks for them.
    """
    lengths = packed.targets.lengths
    batch.device = found.device
    more = {"entropy": Rows(entropies, lengths).padded()} if wants_entropy(loss_fn) else {}
    loss, metrics = check_loss(loss_fn(Rows(found, lengths).padded(), batch, **more))  # [B, T]
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn: got a loss without a gradient, need one made from the logprobs (of a "
            "critic the values) that it is given. Look for detach(), item() and no_grad(); a "
            "loss that may be constant adds 0 * batch.token_mean(logprobs)."
        )
    return loss, metrics | {"loss": loss.detach()}


def check_loss(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The (scalar, metrics) that a loss returned; errors say what it returned in place of it."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        got = type(result).__name__
        if isinstance(result, tuple):
            got = f"({', '.join(type(each).__name__ for each in result)})"
        raise TypeError(f"loss_fn: got {got} back, need (scalar loss, dict of 0-d tensors).")
    loss, metrics = result
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"loss_fn: got a loss of shape {shape}, need a 0-d tensor. Average with "
            "batch.token_mean(...)."
        )
    out = {}
    for name, value in metrics.items():
        try:
            value = torch.as_tensor(value, device=loss.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"loss_fn: metric {name!r}: got {type(value).__name__}, need a 0-d tensor."
            ) from error
        if value.ndim != 0:
            raise TypeError(
                f"loss_fn: metric {name!r} has shape {tuple(value.shape)}, need a 0-d tensor: "
                "reduce it with "
                "batch.token_mean(...)."
            )
        out[name] = value.detach().to(torch.float64)
    return loss, out
