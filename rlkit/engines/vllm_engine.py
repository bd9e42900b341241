"""VLLMEngine: generation by vLLM on CPU and CUDA and by vllm-ascend on NPU, stepped in this
process.
"""

import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.config import SamplingParams
from rlkit.engines import vllm_settings, vllm_worker
from rlkit.engines.base import BaseEngine
from rlkit.engines.requests import OnToken, Request, Response
from rlkit.engines.sampling import row_seeds
from rlkit.engines.stops import GrowingText
from rlkit.models.pretrained import Pretrained, check_weights, shapes
from rlkit.shield import shield


@dataclass(slots=True)
class _Row:
    """A response while it grows."""

    uid: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    text: GrowingText | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VLLMEngine(BaseEngine):
    """``TorchEngine``'s methods over vLLM: continuous batching, the prompt of a group from the
    prefix cache, weights replaced between two tokens.

    One engine on one device and, as vLLM keeps its groups in globals, one in a process until
    ``close``. vLLM's scheduler runs in this process, so it ends with it. What is sampled follows
    (run seed, uid) by vLLM's generators, so the tokens are not TorchEngine's. ``options`` go to
    vLLM's ``EngineArgs``, over those of ``vllm_settings``.
    """

    def __init__(
        self,
        model: Pretrained,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        max_rows: int = 256,
        max_len: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, seed=seed, max_rows=max_rows, max_len=max_len)
        self.kind, self.dtype = torch.device(device).type, dtype
        self.broken: str | None = None  # why the weights are not whole
        self.rows: dict[int, _Row] = {}  # by uid: waiting or running
        self._like = shapes(model.spec, dtype)
        _check_only_one()
        self._options = {"dtype": dtype, "max_rows": self.max_rows, "max_len": self.max_len}
        self._options |= options
        self._llm = vllm_settings.start(model, self.kind, **self._options)
        global _running
        _running = weakref.ref(self)

    # ---- requests ----

    def first_versions(self) -> dict[int, int]:
        """Uid -> version of the first, oldest token of every row that has one."""
        return {uid: row.versions[0] for uid, row in self.rows.items() if row.versions}

    def _queue(self, requests: Sequence[Request]) -> None:
        """Also refuses what vLLM would report logprobs for that no trainer computes."""
        for request in requests:
            if request.sampling.cuts:
                raise ValueError(
                    f"VLLMEngine: got {request.sampling}, need top_k=0, top_p=1 and min_p=0: "
                    "vLLM's logprobs are those among the tokens that are left, which is not what a "
                    "trainer computes. Sample without, or with TorchEngine."
                )
        super()._queue(requests)

    def _begin(self, requests: Sequence[Request]) -> None:
        with shield:
            for request in requests:
                seeds = row_seeds(self.seed, np.asarray(request.uids))
                for uid, seed in zip(request.uids, seeds.tolist(), strict=True):
                    self._start(int(uid), request.prompt_ids, request.sampling, seed)

    def _unfinished(self) -> Collection[int]:
        return self.rows.keys()

    def _start(self, uid: int, prompt_ids: Sequence[int], how: SamplingParams, seed: int) -> None:
        # The salt keeps blocks computed under other weights out of reach.
        prompt = {"prompt_token_ids": list(prompt_ids), "cache_salt": f"v{self.version}"}
        self._llm.add_request(str(uid), prompt, vllm_settings.sampling(how, seed))
        text = GrowingText(self.tokenizer, how.stop) if how.stop else None
        self.rows[uid] = _Row(uid, prompt_ids, how, seed, text)

    def abort(self, uids: Collection[int] | None = None) -> list[Response]:
        """Stop ``uids`` or everything: what has been sampled of them so far, with finish_reason
        ``abort``. Uids that are not here are passed over.
        """
        gone = [uid for uid in self.rows if uids is None or uid in uids]
        self._llm.abort_request([str(uid) for uid in gone])
        rows = [self.rows.pop(uid) for uid in gone]
        return [_response(row, "abort") for row in rows if row.tokens]

    # ---- work ----

    def step(self, *, on_token: OnToken | None = None) -> list[Response]:
        """One pass of vLLM's scheduler: a token for every running row; returns what finished."""
        self._check_not_asleep()
        if self.broken:
            raise RuntimeError(
                f"engine: its weights are half loaded ({self.broken}); load them again, as "
                "Resharder.reshard() does."
            )
        if self.paused or not self.rows:
            return []
        finished, sampled = [], []
        with shield:  # half a step would leave vLLM's scheduler and its worker apart
            for output in self._llm.step():
                row = self.rows.get(int(output.request_id))
                if row is None:
                    continue
                old = len(row.tokens)
                if response := self._take(row, output):
                    finished.append(response)
                new = zip(row.tokens[old:], row.logprobs[old:], strict=True)
                sampled += [(row.uid, *token) for token in new]
        if on_token:
            for token in sampled:
                on_token(*token)
        return finished

    def _take(self, row: _Row, output: Any) -> Response | None:
        """Append what vLLM says is new; the response, if this ends it."""
        (new,) = output.outputs
        for token, candidates in zip(new.token_ids, new.logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(candidates[token].logprob)
            row.versions.append(self.version)
            if row.text and row.text.push(token):
                if not output.finished:
                    self._llm.abort_request([output.request_id])
                del self.rows[row.uid]
                return _response(row, "stop", row.text.found)
        if not output.finished:
            return None
        del self.rows[row.uid]
        return _response(row, new.finish_reason, new.stop_reason)

    # ---- weights and life cycle ----

    def load_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, recompute: bool = True
    ) -> None:
        """Replace all weights in place, between two tokens; running rows go on.

        With ``recompute`` vLLM preempts them and computes their cache again under the new weights.
        Names and shapes are checked before anything changes. An error in vLLM's loading leaves
        the engine refusing to generate, at its old version; the next weights then start vLLM anew,
        and rows that ran begin again.
        """
        check_weights(self._like, tensors, tied=self.spec.tie_embeddings)
        if self.broken:
            return self._start_anew(tensors, version)
        with shield:
            self.broken = "an error while they were loaded"
            self._llm.collective_rpc(vllm_worker.reload_weights, args=(self.kind, dict(tensors)))
            self._llm.reset_prefix_cache(reset_running_requests=recompute)
            self.broken, self.version = None, version

    def _start_anew(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """vLLM can not load into what an error has left half loaded."""
        self._llm.engine_core.shutdown()
        model = Pretrained(self.spec, self.tokenizer, tensors)
        self._llm = vllm_settings.start(model, self.kind, **self._options)
        self.broken, self.version = None, version
        for row in list(self.rows.values()):
            self._start(row.uid, row.prompt_ids, row.sampling, row.seed)

    def weights(self) -> dict[str, Tensor]:
        """Shapes and types by Hugging Face name, ``meta`` tensors: vLLM packs what it holds."""
        return dict(self._like)

    def memory(self) -> dict[str, int]:
        """Bytes of the weights, by their shapes, and of the key-value cache."""
        (cache,) = self._llm.collective_rpc(vllm_worker.cache_bytes)
        nbytes = sum(tensor.nbytes for tensor in self._like.values())
        return {"weights": nbytes, "kv_cache": cache}

    def sleep(self) -> None:
        """Weights to the host, cache freed; refused while rows run. vLLM for CPU has no sleep mode:
        there nothing is freed.
        """
        self._check_may_sleep(len(self.rows))
        if self.kind != "cpu":
            self._llm.sleep(level=1)
        self.asleep = True

    def wake(self) -> None:
        """Serve again after ``sleep``."""
        if self.asleep and self.kind != "cpu":
            self._llm.wake_up()
        self.asleep = False

    def close(self) -> None:
        """End vLLM's engine, so that this process may have another one."""
        global _running
        self.rows.clear()
        self._llm.engine_core.shutdown()
        self.asleep, _running = True, None


_running: "weakref.ref[VLLMEngine] | None" = None


def _check_only_one() -> None:
    """RuntimeError if this process has an engine already: the older would fail once one ends."""
    if _running is not None and _running() is not None:
        gc.collect()
        if _running() is not None:
            raise RuntimeError(
                "VLLMEngine: got a second engine in this process, need one: vLLM keeps its groups "
                "in globals. close() the first, or spawn rollout workers on a Ray cluster, one "
                "process each."
            )


def _response(row: _Row, reason: str, stop_reason: Any = None) -> Response:
    return Response(
        uid=row.uid,
        token_ids=torch.tensor(row.tokens, dtype=torch.int64),
        logprobs=torch.tensor(row.logprobs, dtype=torch.float32),
        token_version=torch.tensor(row.versions, dtype=torch.int64),
        finish_reason=reason,
        sampling=row.sampling,
        stop_reason=stop_reason,
        text=row.text.text if row.text else None,
    )
