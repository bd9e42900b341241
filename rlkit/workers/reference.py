"""ReferenceWorker: reads a policy that does not change."""

from typing import Any

from rlkit.backends.torch_backend import TorchBackend
from rlkit.batch import Batch
from rlkit.batch.store import Column
from rlkit.checks import whole
from rlkit.models.pretrained import Pretrained, need_model
from rlkit.workers import memory
from rlkit.workers.context import WorkerContext
from rlkit.workers.stages import stage
from rlkit.workers.steps import TOKEN_BUDGET, callable_backend, per_token


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
        self.context, self.spec = context or WorkerContext(), need_model(model).spec
        self.token_budget = whole("token_budget", token_budget, what="token")
        make = callable_backend(backend)
        self.backend = make(model, device=self.context.device, context=self.context)
        self.version = 0

    @stage("ref_logprobs", column="ref_logprobs")
    def compute_logprobs(self, batch: Batch) -> Column:
        """Logprobs [B, T] of the response tokens, each at its row's sampling temperature."""
        return per_token(self, batch, "ref_logprobs")

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        return memory.of_backend(self.backend)
