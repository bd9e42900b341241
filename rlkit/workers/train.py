"""ActorWorker trains the policy; ReferenceWorker only reads it; both compute logprobs."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit import trace
from rlkit.backends.torch_backend import TorchBackend
from rlkit.batch import Batch
from rlkit.checks import whole
from rlkit.columns import check_mask
from rlkit.config import OptimConfig
from rlkit.functions import Source, source_of
from rlkit.metrics import StepMetrics, reduce_metric
from rlkit.models import pretrained
from rlkit.models.pretrained import Pretrained
from rlkit.reshard.plan import TensorFacts, facts_of
from rlkit.rows import Rows, concat
from rlkit.store import Column
from rlkit.types import LossFn
from rlkit.workers import memory, state, weights
from rlkit.workers.context import Rendezvous, WorkerContext
from rlkit.workers.shards import Receipt
from rlkit.workers.stages import stage

TOKEN_BUDGET = 8192
CHECKED = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "returns", "values")


class ReferenceWorker:
    """A policy that does not change: the KL's other end."""

    def __init__(
        self,
        model: Pretrained,
        *,
        backend: Any = TorchBackend,
        token_budget: int = TOKEN_BUDGET,
        context: WorkerContext | None = None,
    ) -> None:
        self.context = context or WorkerContext()
        self.token_budget = whole("token_budget", token_budget, what="token")
        self.backend = backend(model, device=self.context.device)
        self.version = 0

    @stage("ref_logprobs", column="ref_logprobs")
    def compute_logprobs(self, batch: Batch) -> Column:
        """Logprobs [B, T] of the response tokens, each at its row's sampling temperature."""
        return _compute_logprobs(self, batch, "ref_logprobs")

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        return memory.of_backend(self.backend)


class ActorWorker:
    """The policy in training: AdamW over micro-batches of at most ``token_budget`` tokens."""

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
        self.token_budget = whole("token_budget", token_budget, what="token")
        self.spec, self.tokenizer = model.spec, model.tokenizer
        peers = self.context.collective
        self.backend = backend(
            model,
            device=self.context.device,
            lr=lr,
            optim=optim,
            reduce=None if peers is None else peers.sum_,
            dp_size=self.context.dp_size,
        )
        self.link = weights.Link(device=self.context.device)
        self._version = 0

    @property
    def version(self) -> int:
        """Policy version: calls of ``update`` that ended."""
        return self._version

    @stage("logprobs", column="old_logprobs")
    def compute_logprobs(self, batch: Batch) -> Column:
        """Logprobs [B, T] of the response tokens under the current weights."""
        return _compute_logprobs(self, batch, "old_logprobs")

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
        check_call(batch, loss_fn, epochs)
        seed, rank, size = self.context.seed, self.context.dp_rank, self.context.dp_size
        steps = [
            step.shard(rank, size)
            for epoch in range(epochs)
            for step in batch.minibatches(minibatches, seed=_mix(seed, self.version, epoch))
        ]
        mine = batch.select(
            np.isin(batch.uids, np.concatenate([step.uids for step in steps]))
        ).load()
        check_finite(mine)
        place = {uid: i for i, uid in enumerate(mine.uids.tolist())}
        records = []
        self.backend.zero_grad()
        for step in steps:
            local = mine.select([place[uid] for uid in step.uids.tolist()])
            local.step_tokens, local.step_rows = step.step_tokens, step.step_rows
            micro = [
                self.backend.forward_backward(piece, loss_fn)
                for piece in local.microbatches(self.token_budget)
            ]
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
        same: dict[str, Any] = {
            f"actor/{name}": value for name, value in average([info for _, info in records]).items()
        }
        same["actor/skipped_steps"] = float(sum(info["skipped_steps"] for _, info in records))
        same["actor/lr"] = records[-1][1]["lr"]
        same["actor/version"] = self.version
        same["actor/loss_hash"] = source.hash
        return StepMetrics(share, same=same, sources={source.hash: source})

    def resync(self) -> None:
        """Take weights, optimizer state and version from rank 0: after a call failed on a rank."""
        peers = self.context.collective
        if peers is not None:
            self._version = self.backend.resync(peers, version=self._version)

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        return memory.of_backend(self.backend)

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name, not copied."""
        return self.backend.state_dict()

    def weight_facts(self) -> list[TensorFacts]:
        """Name, shape and dtype of each weight."""
        return facts_of(self.weights())

    def fingerprints(self) -> dict[str, tuple[int, int]]:
        """Fingerprint of each weight."""
        return weights.fingerprints(self.weights())

    def meet_targets(self) -> tuple[str, int]:
        """Open a meeting point for a weight transfer: (host, port)."""
        return self.link.meet(timeout_s=self.context.timeout_s)

    def join_link(self, host: str, port: int, name: str, size: int, first_rank: int) -> None:
        """Enter a weight transfer's process group; only this group's first rank sends."""
        if self.context.dp_rank == 0:
            meeting = Rendezvous(host, port, name, size)
            self.link.join(meeting, first_rank, timeout_s=self.context.timeout_s)

    def send_weights(self, buckets: Sequence[Sequence[TensorFacts]]) -> None:
        """Send buckets of weights over the link, from this group's first rank."""
        if self.context.dp_rank == 0:
            weights.send(self.link.get(), self.weights(), buckets)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> Path:
        """Write a Hugging Face checkpoint folder."""
        return pretrained.save(folder, self.spec, self.tokenizer, self.backend.state_dict())

    def save_state(self, folder: str | os.PathLike[str]) -> Receipt | None:
        """Write weights, optimizer state and version into a folder; the first rank does.

        Returns each file's bytes and sha256.
        """
        return state.save(self, folder)

    def load_state(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what ``save_state`` wrote; an error leaves the worker as it was."""
        self._version = state.load(self, folder)


def _compute_logprobs(worker: Any, batch: Batch, name: str) -> Column:
    context = worker.context
    mine = batch.shard(context.dp_rank, context.dp_size)
    local = mine.load()
    place = {uid: i for i, uid in enumerate(mine.uids.tolist())}
    pieces = local.microbatches(worker.token_budget)
    found = [worker.backend.forward(piece)[0] for piece in pieces]
    if not found:
        rows = Rows(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    else:
        order = np.argsort(
            [place[uid] for piece in pieces for uid in piece.uids.tolist()], kind="stable"
        )
        rows = concat(found, name=name).select(torch.from_numpy(order))
    return Column(name, batch.store, mine.uids, [batch.store.put(name, mine.uids, rows)])


def check_call(batch: Batch, loss_fn: Callable[..., Any], epochs: int) -> None:
    """Errors of an update that can be told before any work."""
    if not len(batch):
        raise ValueError("update: got an empty batch, need at least one row.")
    whole("epochs", epochs)
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: got {type(loss_fn).__name__}, need a function (logprobs [B, T], batch) -> "
            "(loss, metrics)."
        )
    names = list(inspect.signature(loss_fn).parameters)
    if len(names) < 2:
        raise TypeError(f"loss_fn: got parameters {names}, need (logprobs, batch).")


def check_finite(batch: Batch) -> None:
    """ValueError if a column that a loss reads holds NaN or infinity under the mask, or if the
    mask is none.

    Names column, uid and token.
    """
    if "response_mask" in batch:
        check_mask("response_mask", batch["response_mask"])
    for name in CHECKED:
        if name not in batch.columns:
            continue
        values = batch[name]
        bad = ~torch.isfinite(values)
        if values.ndim == 2 and "response_mask" in batch:
            bad &= batch["response_mask"].bool()
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name}: got {values[tuple(where)].item()} in the row of uid "
                f"{int(batch.uids[where[0]])}"
                f"{f', token {where[1]}' if len(where) > 1 else ''}; need finite numbers under "
                "the response mask. "
                "Look at the stage that wrote it, or drop the row with batch.select."
            )


def add_up(shares: list[Mapping[str, Tensor]]) -> dict[str, float]:
    """Metrics of micro-batches as one: sums; maxima and minima of names ending in _max and _min."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for share in shares for name in share):
        values = [float(share[name]) for share in shares if name in share]
        out[name] = reduce_metric(name, values)
    return out


def average(records: list[dict[str, float]]) -> dict[str, float]:
    """Mean over optimizer steps; maxima and minima stay such."""
    out = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record[name] for record in records if name in record]
        extreme = name.endswith(("_max", "_min"))
        out[name] = reduce_metric(name, values) if extreme else sum(values) / len(records)
    return out


def _mix(seed: int, version: int, epoch: int) -> int:
    return (seed * 1_000_003 + version) * 1_009 + epoch
