"""RolloutWorker: prompts in, responses out."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rlkit.batch import Batch
from rlkit.checks import whole
from rlkit.config import Layout, SamplingParams
from rlkit.engines.requests import Request
from rlkit.engines.torch_engine import TorchEngine
from rlkit.models.pretrained import Pretrained, need_model
from rlkit.reshard.plan_forms import separate
from rlkit.reshard.plan_layouts import Held
from rlkit.reshard.plan_moves import ReshardPlan
from rlkit.reshard.report import ReshardReport
from rlkit.shield import shield
from rlkit.workers import memory, weights
from rlkit.workers.context import Rendezvous, WorkerContext
from rlkit.workers.in_flight import UID_BITS, Asked, InFlight, batch_of, reserve_samples
from rlkit.workers.stages import on_driver, stage


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
        self.context.layout.whole("RolloutWorker")
        self.spec, self.tokenizer = need_model(model).spec, model.tokenizer
        self.max_new_tokens = whole("max_new_tokens", max_new_tokens)
        self.engine = engine(
            model, device=self.context.device, seed=self.context.seed, max_rows=max_rows
        )
        self.link = weights.Link(device=self.context.device)
        self.staged: dict[str, Tensor] | None = None
        self.in_flight = InFlight()

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
        asked, requests = self._ask(prompts, n, temperature, max_new_tokens, first_sample)
        try:
            self.engine.generate(requests, on_response=self.in_flight.note)
        except BaseException:
            self._recover()
            raise
        return batch_of(self.in_flight.take(asked), self.tokenizer, of=asked)

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
        asked, requests = self._ask(prompts, n, temperature, max_new_tokens, first_sample)
        left = len(requests)
        try:
            for request in requests:
                self.engine.add(request)
            while left:
                if not self.in_flight.has(asked):
                    raise RuntimeError(
                        "stream: an error in another call has aborted its responses."
                    )
                self._step()
                if self.in_flight.num_finished(asked) >= min(least, left):
                    groups = self.in_flight.take(asked)
                    left -= len(groups)
                    yield batch_of(groups, self.tokenizer)
        finally:
            self.engine.abort(self.in_flight.drop(asked))

    @on_driver(reserve_samples)
    def begin(
        self,
        prompts: Batch,
        *,
        ranks: np.ndarray | None = None,
        n: int = 1,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        first_sample: np.ndarray | None = None,
    ) -> None:
        """Queue ``n`` responses to each prompt beside those that run; ``advance`` generates.

        ``ranks`` [P]: the worker that gets each prompt, by default an equal share. An error or an
        interrupt of another call lets what is half written of them begin again.
        """
        asked, requests = self._ask(
            prompts, n, temperature, max_new_tokens, first_sample, ranks=ranks, kept=True
        )
        try:
            for request in requests:
                self.engine.add(request)
        except BaseException:
            self.engine.abort(self.in_flight.drop(asked))
            raise

    @stage("generate")
    def advance(self, *, seconds: float = 0.1, max_age: int | None = None) -> Batch | None:
        """Generate for ``seconds``, or until nothing runs: the groups finished meanwhile, whole.

        Between two calls the weights may change: what is half written goes on under the new ones,
        but for responses whose first token is more than ``max_age`` versions old, which begin again
        (partial rollout with a maximum age, MindSpeed RL).
        """
        if max_age is not None:
            now, first = self.version, self.engine.first_versions()
            self._begin_again({uid for uid in first if now - first[uid] > max_age})
        end_s = time.monotonic() + seconds
        while self.in_flight.running:
            self._step()
            if time.monotonic() > end_s:
                break
        groups = self.in_flight.take()
        return batch_of(groups, self.tokenizer) if groups else None

    def begun(self) -> list[int]:
        """Ids of the groups of ``begin`` that ``advance`` has not given yet."""
        return sorted(self.in_flight.kept())

    def abort(self) -> None:
        """Forget the groups of ``begin``, and end what is half written of them."""
        self.engine.abort(self.in_flight.drop_kept())

    def _step(self) -> None:
        self.engine.check_awake()
        try:
            with shield:  # rows that the engine has let go of are noted
                for response in self.engine.step():
                    self.in_flight.note(response)
        except Exception:
            self._recover()
            raise

    def _recover(self) -> None:
        """After an error in the engine: nothing runs, and groups of ``begin`` begin again."""
        self.engine.abort()
        self.in_flight.drop_calls()
        self._begin_again()

    def _begin_again(self, uids: Collection[int] | None = None) -> None:
        """Responses of ``begin`` that have not ended, of these ``uids`` or all."""
        again = self.in_flight.left(uids)
        self.engine.abort([uid for request in again for uid in request.uids])
        for request in again:
            self.engine.add(request)

    def _ask(
        self,
        prompts: Batch,
        n: int,
        temperature: float,
        max_new_tokens: int | None,
        first_sample: np.ndarray | None,
        *,
        ranks: np.ndarray | None = None,
        kept: bool = False,
    ) -> tuple[Asked, list[Request]]:
        """This rank's prompts as groups in flight, and a request for each."""
        if first_sample is None:
            first_sample = np.asarray(reserve_samples(prompts, n=n)["first_sample"])
        sampling = SamplingParams(
            temperature=temperature,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            stop_token_ids=(self.tokenizer.eos_id,),
        )
        rank, size = self.context.dp_rank, self.context.dp_size
        if ranks is None:  # ranks in order: rows stay in order
            mine = np.array_split(np.arange(len(prompts)), size)[rank]
        else:
            mine = np.flatnonzero(ranks == rank)
        uids = (prompts.meta["group_ids"] << UID_BITS) + first_sample
        uids, prompts = uids[mine, None] + np.arange(n), prompts.select(mine)  # [P, n]
        ids = prompts._column("prompt_ids").load(prompts.uids).unpack()
        pairs = zip(ids, uids.tolist(), strict=True)
        requests = [Request(prompt.tolist(), own, sampling) for prompt, own in pairs]
        return self.in_flight.add(prompts, requests, kept=kept), requests

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Replace the engine's weights as a whole and advance its version."""
        self.engine.load_weights(tensors, version=version)

    def weights(self) -> dict[str, Tensor]:
        """The engine's weights by name, not copied."""
        return self.engine.weights()

    def memory(self) -> dict[str, int]:
        """Bytes held now, by category of the trace."""
        return memory.of_engine(self.engine, self.staged)

    def held(self) -> Held:
        """How an engine holds the model: whole, by Hugging Face name, unless it says otherwise."""
        layout = getattr(self.engine, "layout", Layout())
        form = getattr(self.engine, "form", separate)
        return Held(model=self.spec, layout=layout, form=form, dtype="float32")

    def join_link(
        self, meeting: tuple[str, int, str, int], first_rank: int, plan: ReshardPlan
    ) -> None:
        """Enter a weight transfer's process group, with the plan of what moves."""
        rank = first_rank + self.context.dp_rank
        self.link.join(Rendezvous(*meeting), rank, plan, timeout_s=self.context.timeout_s)

    def receive_weights(self, *, version: int, link: str) -> ReshardReport:
        """Receive what that link's plan says beside the weights in use, compared as it comes."""
        shards, report = self.link.move({}, version=version, link=link)
        return self.stage_weights(shards.hand_over(), report)

    def stage_weights(self, tensors: Mapping[str, Tensor], report: ReshardReport) -> ReshardReport:
        """Keep whole new weights until they are published; the report, with those in use added."""
        self.staged = dict(tensors)
        in_use = memory.of_engine(self.engine, None).get("weights", 0)
        return replace(report, peak_gib=report.peak_gib + in_use / 2**30)

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
