"""ActorWorker trains the policy, CriticWorker its values."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlkit import trace
from rlkit.algo import clipped_value_loss
from rlkit.backends.torch_backend import TorchBackend
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.checks import whole
from rlkit.config import Layout, OptimConfig
from rlkit.functions import Source, source_of
from rlkit.metrics import StepMetrics
from rlkit.models import pretrained
from rlkit.models.pretrained import Pretrained, need_model
from rlkit.reshard.fingerprints import fingerprint
from rlkit.reshard.plan_forms import separate
from rlkit.reshard.plan_layouts import Held
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.swap import HostSwap
from rlkit.types import LossFn
from rlkit.workers import memory, state, weights
from rlkit.workers.context import Rendezvous, WorkerContext
from rlkit.workers.shards import Receipt
from rlkit.workers.stages import stage
from rlkit.workers.steps import (
    TOKEN_BUDGET,
    add_up,
    average,
    callable_backend,
    check_call,
    check_finite,
    check_tokens,
    forward_backward_all,
    mix,
    per_token,
)


class Trainer:
    """What actor and critic share: AdamW over micro-batches of at most ``token_budget`` tokens."""

    area = ""
    """Of the metrics that every update writes."""
    loss_name = ""
    """Metric of the loss."""

    def __init__(
        self,
        model: Pretrained,
        *,
        lr: float = 1e-6,
        optim: OptimConfig | None = None,
        backend: Any = TorchBackend,
        token_budget: int = TOKEN_BUDGET,
        context: WorkerContext | None = None,
    ) -> None:
        self.context = context or WorkerContext()
        self.spec, self.tokenizer = need_model(model).spec, model.tokenizer
        self.token_budget = whole("token_budget", token_budget, what="token")
        self._away: HostSwap | None = None
        self._backend = callable_backend(backend)(
            model, device=self.context.device, lr=lr, optim=optim, context=self.context
        )
        self._version = 0

    @property
    def backend(self) -> Any:
        """The backend, with its tensors on the device."""
        self.onload()
        return self._backend

    @property
    def version(self) -> int:
        """Calls of ``update`` that ended; of an actor the policy version."""
        return self._version

    def _update(
        self, batch: Batch, loss_fn: LossFn, *, minibatches: int, epochs: int
    ) -> StepMetrics:
        check_call(batch, loss_fn, epochs)
        seed, rank, size = self.context.seed, self.context.dp_rank, self.context.dp_size
        steps = [
            step.shard(rank, size)
            for epoch in range(epochs)
            for step in batch.minibatches(minibatches, seed=mix(seed, self.version, epoch))
        ]
        mine = batch.select(
            np.isin(batch.uids, np.concatenate([step.uids for step in steps]))
        ).load()
        check_finite(mine)
        check_tokens(mine, self.spec.vocab_size)
        place = {uid: i for i, uid in enumerate(mine.uids.tolist())}
        records = []
        self.backend.zero_grad()
        for step in steps:
            local = mine.select([place[uid] for uid in step.uids.tolist()])
            local.step_tokens, local.step_rows = step.step_tokens, step.step_rows
            pieces = local.microbatches(self.token_budget)
            micro = forward_backward_all(self.backend, pieces, loss_fn)
            trace.sample_memory()  # here, gradients are there, too
            records.append((add_up(micro), self.backend.step()))
        self._version += 1
        return self._metrics(records, source_of(loss_fn))

    def _metrics(
        self, records: list[tuple[dict[str, float], dict[str, float]]], source: Source
    ) -> StepMetrics:
        """This rank's share of the metrics, averaged over optimizer steps, and what all ranks agree
        on.
        """
        share = average([shares for shares, _ in records])
        share[self.loss_name] = share.pop("loss", 0.0)  # no rows on this rank: no loss
        if not self.context.speaks:  # its peers say the same
            share = {}
        same: dict[str, Any] = average([info for _, info in records])
        same["skipped_steps"] = float(sum(info["skipped_steps"] for _, info in records))
        same |= {"lr": records[-1][1]["lr"], "version": self.version, "loss_hash": source.hash}
        same = {f"{self.area}/{name}": value for name, value in same.items()}
        return StepMetrics(share, same=same, sources={source.hash: source})

    def resync(self) -> None:
        """Take weights, optimizer state and version from rank 0: after a call failed on a rank."""
        peers = self.context.collective
        if peers is not None:
            self._version = self.backend.resync(peers, version=self._version)

    def offload(self) -> None:
        """Move weights, optimizer state and buffers of gradients to host memory, until a call needs
        them; ``memory()`` then counts them as ``host_swap``.
        """
        if not hasattr(self._backend, "resident"):
            raise TypeError(
                f"offload: got a {type(self._backend).__name__} without resident(), need one that "
                "says which tensors stay on the device between calls. Give the backend "
                "resident() -> {name: tensor} of its weights and optimizer states, not copied; or "
                "reshard with strategy=rk.reshard.direct, which leaves them there."
            )
        swap = HostSwap(self.backend.resident())
        swap.out()
        self._away = swap

    def onload(self) -> None:
        """Bring back what ``offload`` took."""
        if self._away is not None:
            self._away.back()
            self._away = None

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        held = memory.of_backend(self._backend)
        return held if self._away is None else held | {"host_swap": self._away.host_bytes}

    def save_state(self, folder: str | os.PathLike[str]) -> Receipt | None:
        """Write weights, optimizer state and version into a folder; the first rank does.

        Returns each file's bytes and sha256.
        """
        return state.save(self, folder)

    def load_state(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what ``save_state`` wrote; an error leaves the worker as it was."""
        self._version = state.load(self, folder)


class ActorWorker(Trainer):
    """The policy in training."""

    area, loss_name = "actor", "policy/loss"

    @functools.cached_property
    def link(self) -> weights.Link:
        """Its ends of weight transfers."""
        return weights.Link(device=self.context.device)

    @stage("logprobs", column="old_logprobs")
    def compute_logprobs(self, batch: Batch) -> Column:
        """Logprobs [B, T] of the response tokens under the current weights."""
        return per_token(self, batch, "old_logprobs")

    @stage("update")
    def update(
        self, batch: Batch, *, loss_fn: LossFn, minibatches: int = 1, epochs: int = 1
    ) -> StepMetrics:
        """``epochs`` passes over the batch, each of ``minibatches`` optimizer steps on whole
        groups.

        Means in the metrics are over the trainable tokens of an optimizer step, then over the
        steps. The version advances by one. An error leaves the version, and the weights as of the
        last whole optimizer step.
        """
        return self._update(batch, loss_fn, minibatches=minibatches, epochs=epochs)

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name, not copied."""
        return self.backend.state_dict()

    def held(self) -> Held:
        """How this group's ranks hold the model: whole, or as a backend with a ``form`` cuts it."""
        form = getattr(self.backend, "form", None)
        layout = self.backend.layout if form else Layout()
        dtype = str(next(iter(self.shard().values())).dtype)[6:]
        return Held(model=self.spec, layout=layout, form=form or separate, dtype=dtype)

    def shard(self) -> Mapping[str, Tensor]:
        """This rank's tensors, as ``held`` says."""
        return self.backend.shards if hasattr(self.backend, "form") else self.weights()

    def fingerprints(self) -> dict[str, int]:
        """Fingerprint of each weight, which two runs or ranks can compare."""
        return {name: fingerprint(tensor) for name, tensor in self.weights().items()}

    def meet_targets(self) -> tuple[str, int]:
        """Open a meeting point for a weight transfer: (host, port)."""
        return self.link.meet(timeout_s=self.context.timeout_s)

    def join_link(
        self, meeting: tuple[str, int, str, int], first_rank: int, plan: ReshardPlan
    ) -> None:
        """Enter a weight transfer's process group, with the plan of what moves."""
        rank = first_rank + self.context.rank
        self.link.join(Rendezvous(*meeting), rank, plan, timeout_s=self.context.timeout_s)

    def send_weights(self, *, version: int, link: str) -> None:
        """Send what that link's plan says of this rank's tensors."""
        self.link.move(self.shard(), version=version, link=link)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write a Hugging Face checkpoint folder; the first rank does."""
        tensors = self.backend.state_dict()
        if self.context.rank:
            return Path(folder)
        return pretrained.save(folder, self.spec, self.tokenizer, tensors)


class CriticWorker(Trainer):
    """The critic of PPO in training: the policy's body, with a value head that starts at 0."""

    area, loss_name = "critic", "critic/loss"

    def __init__(
        self,
        model: Pretrained,
        *,
        lr: float = 1e-5,
        optim: OptimConfig | None = None,
        backend: Any = TorchBackend,
        token_budget: int = TOKEN_BUDGET,
        context: WorkerContext | None = None,
    ) -> None:
        model = need_model(model).as_critic()
        super().__init__(
            model, lr=lr, optim=optim, backend=backend, token_budget=token_budget, context=context
        )

    @stage("values", column="values")
    def compute_values(self, batch: Batch) -> Column:
        """Values [B, T]: at each response token that of the state before it."""
        return per_token(self, batch, "values")

    @stage("critic_update")
    def update(
        self,
        batch: Batch,
        *,
        loss_fn: LossFn = clipped_value_loss,
        minibatches: int = 1,
        epochs: int = 1,
    ) -> StepMetrics:
        """``ActorWorker.update`` for a loss (values [B, T], batch) -> (scalar, metrics)."""
        return self._update(batch, loss_fn, minibatches=minibatches, epochs=epochs)
