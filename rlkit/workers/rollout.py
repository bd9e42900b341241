"""RolloutWorker: prompts in, responses out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.batch import Batch
from rlkit.checks import whole
from rlkit.columns import check_group_ids
from rlkit.config import SamplingParams
from rlkit.engines.requests import Request, Response
from rlkit.engines.torch_engine import TorchEngine
from rlkit.models.pretrained import Pretrained
from rlkit.reshard.plan import TensorFacts, facts_of
from rlkit.rows import Rows
from rlkit.store import Column
from rlkit.workers import memory, weights
from rlkit.workers.context import Rendezvous, WorkerContext
from rlkit.workers.stages import on_driver, stage

UID_BITS = 16  # uid = group id, then the sample's number in its group


def reserve_samples(
    prompts: Batch, *, n: int = 1, first_sample: Any = None, **others: Any
) -> dict[str, Any]:
    """On the driver, before prompts are handed out.

    Number the samples, so that drawing again gives new uids.
    """
    if not isinstance(prompts, Batch):
        raise TypeError(
            f"generate: got {type(prompts).__name__}, need a batch of prompts: of a task, or "
            "rk.tasks.prompt_batch([(prompt, answer), ...], tokenizer=model.tokenizer, "
            "group_ids=[...])."
        )
    n = whole("n", n, what="response a prompt")
    if not len(prompts):
        raise ValueError("generate: got no prompts, need at least one.")
    check_group_ids(prompts.meta["group_ids"])
    if first_sample is None:
        first_sample = prompts.reserve(n)
    return {"first_sample": first_sample}


class RolloutWorker:
    """Generates with an engine; weights come from a resharder."""

    def __init__(
        self,
        model: Pretrained,
        *,
        engine: Any = TorchEngine,
        max_new_tokens: int = 32,
        max_rows: int = 256,
        context: WorkerContext | None = None,
    ) -> None:
        self.context = context or WorkerContext()
        self.tokenizer = model.tokenizer
        self.max_new_tokens = whole("max_new_tokens", max_new_tokens)
        self.engine = engine(
            model, device=self.context.device, seed=self.context.seed, max_rows=max_rows
        )
        self.link = weights.Link(device=self.context.device)
        self.staged: dict[str, Tensor] | None = None
        self._streaming = False

    @property
    def version(self) -> int:
        """Policy version of the engine's weights."""
        return self.engine.version

    @stage("generate")
    @on_driver(reserve_samples)
    def generate(
        self,
        prompts: Batch,
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        first_sample: np.ndarray | None = None,
    ) -> Batch:
        """``n`` responses to each of P prompts: a batch of P·n rows, a prompt's responses next to
        each other.

        Adds response, response_ids, response_mask, rollout_logprobs, token_version, finish_reason,
        temperature; the prompts' own columns are repeated. uid = group id x 65536 + sample number.
        """
        prompts, uids, requests = self._requests(
            prompts, n, temperature, max_new_tokens, first_sample
        )
        return self._batch(prompts, uids, self.engine.generate(requests), n=n)

    @stage("generate")
    @on_driver(reserve_samples)
    def stream(
        self,
        prompts: Batch,
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        first_sample: np.ndarray | None = None,
        least: int = 1,
    ) -> Iterator[Batch]:
        """``generate`` piece by piece: yields groups as soon as ``least`` of them are finished.

        The same rows with the same tokens, in the order in which groups end; a group is never cut.
        """
        least = whole("least", least, what="group")
        prompts, uids, requests = self._requests(
            prompts, n, temperature, max_new_tokens, first_sample
        )
        group_of = {uid: i // n for i, uid in enumerate(uids.tolist())}
        done: dict[int, dict[int, Response]] = {}  # group -> uid -> response
        finished: list[int] = []
        self._streaming = True
        try:
            for request in requests:
                self.engine.add(request)
            left = len(requests)
            while left:
                for response in self.engine.step():
                    group = group_of[response.uid]
                    done.setdefault(group, {})[response.uid] = response
                    if len(done[group]) == n:
                        finished.append(group)
                if len(finished) >= min(least, left):
                    left -= len(finished)
                    at = sorted(finished)
                    finished.clear()
                    rows = [uid for group in at for uid in uids[group * n : (group + 1) * n]]
                    responses = [done[group_of[uid]][uid] for uid in rows]
                    yield self._batch(prompts.select(at), np.asarray(rows), responses, n=n)
        finally:
            self._streaming = False
            self.engine.abort()

    def _requests(
        self,
        prompts: Batch,
        n: int,
        temperature: float,
        max_new_tokens: int | None,
        first_sample: np.ndarray | None,
    ) -> tuple[Batch, np.ndarray, list[Request]]:
        """This rank's prompts, the uids [P * n] of their responses, and a request a prompt."""
        if self._streaming:
            raise RuntimeError(
                "generate: a stream of this worker is open; use it up or close() it first."
            )
        if first_sample is None:
            first_sample = np.asarray(reserve_samples(prompts, n=n)["first_sample"])
        sampling = SamplingParams(
            temperature=temperature,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop_token_ids=(self.tokenizer.eos_id,),
        )
        uids = (prompts.meta["group_ids"] << UID_BITS) + first_sample
        rank, size = self.context.dp_rank, self.context.dp_size
        mine = np.array_split(np.arange(len(prompts)), size)[
            rank
        ]  # ranks in order: rows stay in order
        prompts = prompts.select(mine)
        uids = (uids[mine, None] + np.arange(n)).reshape(-1)  # [P * n]
        ids = prompts._column("prompt_ids").load(prompts.uids).unpack()
        requests = [
            Request(prompt.tolist(), uids[i * n : (i + 1) * n].tolist(), sampling)
            for i, prompt in enumerate(ids)
        ]
        return prompts, uids, requests

    def _batch(
        self, prompts: Batch, uids: np.ndarray, responses: list[Response], *, n: int
    ) -> Batch:
        """Write the responses' columns, and the prompts' columns once for each response."""
        repeat = torch.arange(len(prompts)).repeat_interleave(n)
        lengths = torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64)
        versions = [int(r.token_version.min()) for r in responses]

        def ragged(values: list[Tensor], dtype: torch.dtype) -> Rows:
            return Rows(torch.cat(values) if values else torch.zeros(0, dtype=dtype), lengths)

        columns = {
            name: column.load(prompts.uids).select(repeat)
            for name, column in prompts.columns.items()
        }
        columns |= {
            "response": Rows(
                self.tokenizer.decode_batch([r.token_ids.tolist() for r in responses])
            ),
            "response_ids": ragged([r.token_ids for r in responses], torch.int64),
            "response_mask": Rows(torch.ones(int(lengths.sum()), dtype=torch.int8), lengths),
            "rollout_logprobs": ragged([r.logprobs for r in responses], torch.float32),
            "token_version": ragged([r.token_version for r in responses], torch.int64),
            "finish_reason": Rows([r.finish_reason for r in responses]),
            "temperature": Rows(
                torch.tensor([r.temperature for r in responses], dtype=torch.float32)
            ),
        }
        store = prompts.store
        return Batch(
            uids,
            store=store,
            group_ids=prompts.meta["group_ids"].repeat(n),
            policy_version=np.asarray(versions, dtype=np.int64),
            columns={
                name: Column(name, store, uids, [store.put(name, uids, rows)])
                for name, rows in columns.items()
            },
        )

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Replace the engine's weights as a whole and advance its version."""
        self.engine.load_weights(tensors, version=version)

    def weights(self) -> dict[str, Tensor]:
        """The engine's weights by name, not copied."""
        return self.engine.weights()

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        return memory.of_engine(self.engine, self.staged)

    def weight_facts(self) -> list[TensorFacts]:
        """Name, shape and dtype of each weight."""
        return facts_of(self.weights())

    def join_link(self, host: str, port: int, name: str, size: int, first_rank: int) -> None:
        """Enter a weight transfer's process group."""
        meeting, rank = Rendezvous(host, port, name, size), first_rank + self.context.dp_rank
        self.link.join(meeting, rank, timeout_s=self.context.timeout_s)

    def receive_weights(self, buckets: Sequence[Sequence[TensorFacts]]) -> None:
        """Receive buckets beside the weights in use, and compare their fingerprints."""
        self.staged = weights.receive(self.link.get(), buckets, device=self.context.device)

    def stage_weights(
        self, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, int]]
    ) -> None:
        """Take tensors of this process in place of received ones; compared all the same."""
        staged = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        weights.compare(expected, staged)
        self.staged = staged

    def publish_weights(self, *, version: int) -> None:
        """Serve the staged weights as ``version``."""
        if self.staged is None:
            raise RuntimeError("publish: no weights are staged; run Resharder.reshard().")
        self.load_weights(self.staged, version=version)
        self.staged = None

    def discard_weights(self) -> None:
        """Forget staged weights."""
        self.staged = None

    def pause(self) -> None:
        """Stop after the current token."""
        self.engine.pause()

    def resume(self) -> None:
        """Go on after ``pause``."""
        self.engine.resume()

    def sleep(self) -> None:
        """Free the engine's cache."""
        self.engine.sleep()

    def wake(self) -> None:
        """Serve again after ``sleep``."""
        self.engine.wake()
