"""TorchEngine: generation in plain torch, slots refilled as rows finish, a group's prompt computed
once.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlkit.checks import whole
from rlkit.engines.kv_cache import Decode, KVCache, Prefill
from rlkit.engines.requests import Request, Response, Row
from rlkit.engines.sampling import noise, sample
from rlkit.models.attention import positions
from rlkit.models.decoder import Decoder
from rlkit.models.pretrained import Pretrained, load_weights
from rlkit.shield import shield


class TorchEngine:
    """Continuous batching over at most ``max_rows`` slots of one model on one device.

    The cache of keys and values is as large as the requests so far needed.
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
    ) -> None:
        self.spec, self.seed, self.version = model.spec, seed, 0
        self.decoder: Decoder = model.build(device=device, dtype=dtype).requires_grad_(False)
        self.device, self.dtype = torch.device(device), dtype
        self.max_rows = whole("max_rows", max_rows, what="slot")
        longest = model.spec.max_positions
        self.max_len = longest if max_len is None else min(whole("max_len", max_len), longest)
        self.waiting: deque[Request] = deque()
        self.rows: list[Row] = []  # row i sits in slot i
        self.cache: KVCache | None = None
        self.paused = self.asleep = False

    # ---- requests ----

    def add(self, request: Request) -> None:
        """Queue one prompt; errors at once if it can never fit."""
        self._check(request)
        self._check_unique([request])
        self.waiting.append(request)

    def _check(self, request: Request) -> None:
        """ValueError for a request that can never run."""
        length = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_ids) or not len(request.uids):
            raise ValueError("request: got an empty prompt or no uids, need at least one of each.")
        if length > self.max_len:
            raise ValueError(
                f"request: got {len(request.prompt_ids)} prompt + "
                f"{request.sampling.max_new_tokens} new tokens, need at "
                f"most {self.max_len}. Shorten the prompt or lower max_new_tokens."
            )
        bad = [t for t in request.prompt_ids if not 0 <= t < self.spec.vocab_size]
        if bad:
            raise ValueError(
                f"request: got token ids {bad[:3]}, need ids from 0 to {self.spec.vocab_size - 1}."
            )
        if len(request.uids) > self.max_rows:
            raise ValueError(
                f"request: got {len(request.uids)} samples of one prompt, need at most "
                f"max_rows={self.max_rows}."
            )

    def _check_unique(self, requests: Sequence[Request]) -> None:
        """ValueError for a uid that two responses would have."""
        counts = Counter(uid for request in requests for uid in request.uids)
        counts.update(row.uid for row in self.rows)
        twice = [uid for uid, num in counts.items() if num > 1]
        if twice:
            raise ValueError(
                f"uids: got {twice[0]} more than once ({len(twice)} such), need one a response: "
                "equal uids draw equal tokens. Give each prompt of a call a group id of its own."
            )

    def generate(self, requests: Sequence[Request]) -> list[Response]:
        """All responses of ``requests``, in their order; requests queued before are served too and
        dropped.

        An error or an interrupt aborts everything: rows left over would hold up ``load_weights``.
        """
        for request in requests:
            self._check(request)
        self._check_unique([*requests, *self.waiting])
        self._check_awake()
        self.waiting.extend(requests)
        done: dict[int, Response] = {}
        try:
            while self.waiting or self.rows:
                self._check_awake()
                done |= {response.uid: response for response in self.step()}
        except BaseException:
            self.abort()
            raise
        return [done[uid] for request in requests for uid in request.uids]

    def _check_awake(self) -> None:
        if self.paused or self.asleep:
            raise RuntimeError("engine: paused or asleep; call resume() or wake() first.")

    def abort(self) -> list[Response]:
        """Stop everything: what was sampled so far comes back with finish_reason ``abort``."""
        self.waiting.clear()
        stopped = [row.response("abort") for row in self.rows]
        self.rows = []
        return stopped

    # ---- work ----

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """One token for every running row, after admitting waiting prompts to free slots.

        Returns finished responses.
        """
        if self.asleep:
            raise RuntimeError("engine: asleep; call wake() and load weights before generating.")
        if self.paused:
            return []
        running = len(self.rows)
        logits = [self._decode(running)] if running else []
        admitted = self._admit()
        if admitted:
            logits.append(self._prefill(admitted, first_slot=running))
        if not self.rows:
            return []
        return self._sample(torch.cat(logits))

    def _decode(self, num: int) -> Tensor:
        """Logits [num, V] after the last token of each running row."""
        assert self.cache is not None
        ids = torch.tensor([row.last for row in self.rows[:num]], device=self.device)
        at = self.cache.lengths[:num].clone()
        hidden = self.decoder(ids, at, Decode(self.cache, num))
        self.cache.lengths[:num] += 1
        return self.decoder.logits(hidden)

    def _admit(self) -> list[Request]:
        """Requests that fit into free slots, first come first served; a group is admitted whole."""
        free = self.max_rows - len(self.rows)
        admitted = []
        while self.waiting and len(self.waiting[0].uids) <= free:
            request = self.waiting.popleft()
            free -= len(request.uids)
            admitted.append(request)
            draws = noise(self.seed, np.asarray(request.uids), request.sampling.max_new_tokens)
            self.rows += [
                Row(uid, request.sampling, draw)
                for uid, draw in zip(request.uids, draws, strict=True)
            ]
        return admitted

    def _prefill(self, requests: Sequence[Request], *, first_slot: int) -> Tensor:
        """Logits [rows, V] after each prompt, one row a sample; the prompt itself runs once."""
        cache = self._cache_for(requests, used=first_slot)
        lengths = torch.tensor([len(r.prompt_ids) for r in requests])
        copies = torch.tensor([len(r.uids) for r in requests])
        first = first_slot + copies.cumsum(0) - copies  # [requests] slot of each group's first row
        ids = torch.tensor([t for r in requests for t in r.prompt_ids], device=self.device)
        hidden = self.decoder(ids, positions(lengths), Prefill(cache, lengths, first))
        logits = self.decoder.logits(hidden[(lengths.cumsum(0) - 1).to(self.device)])
        slots = torch.arange(first_slot, first_slot + int(copies.sum()))
        source = first.repeat_interleave(copies)
        cache.move(source[source != slots], slots[source != slots])
        return logits.repeat_interleave(copies.to(self.device), dim=0)

    def _cache_for(self, requests: Sequence[Request], *, used: int) -> KVCache:
        """The cache, with room for ``requests`` beside the ``used`` rows that run."""
        slots = len(self.rows)
        length = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
        if self.cache is None:
            self.cache = KVCache(
                self.spec, num_slots=slots, max_len=length, device=self.device, dtype=self.dtype
            )
        elif slots > self.cache.num_slots or length > self.cache.max_len:
            slots = _grown(self.cache.num_slots, slots, most=self.max_rows)
            length = _grown(self.cache.max_len, length, most=self.max_len)
            self.cache.grow(num_slots=slots, max_len=length, used=used)
        return self.cache

    def _sample(self, logits: Tensor) -> list[Response]:
        """Sample each row's next token from logits [rows, V], record it, and take finished rows
        out.
        """
        temperature = torch.tensor(
            [row.sampling.temperature for row in self.rows], device=self.device
        )
        uniform = torch.tensor(
            [row.draws[len(row.tokens)] for row in self.rows], dtype=torch.float64
        )
        tokens, logprobs = sample(logits, temperature, uniform.to(self.device))
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.version)
        done = [i for i, row in enumerate(self.rows) if row.finish_reason]
        finished = [self.rows[i].response(self.rows[i].finish_reason) for i in done]
        if done:
            self._compact(done)
        return finished

    def _compact(self, done: list[int]) -> None:
        """Fill the slots of finished rows with the last running ones, so that running rows stay the
        first.
        """
        assert self.cache is not None
        left = len(self.rows) - len(done)
        gone = set(done)
        holes = [i for i in done if i < left]
        movers = [i for i in range(left, len(self.rows)) if i not in gone]
        self.cache.move(
            torch.tensor(movers, dtype=torch.long), torch.tensor(holes, dtype=torch.long)
        )
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        del self.rows[left:]

    # ---- weights and life cycle ----

    def load_weights(self, tensors: Mapping[str, Tensor], *, version: int) -> None:
        """Replace all weights; refused while rows run, whose cache would mix two policies."""
        if self.rows:
            raise RuntimeError(
                f"engine: {len(self.rows)} rows are running; finish or abort them before loading "
                "weights."
            )
        with shield:
            load_weights(self.decoder, tensors)
            self.version = version

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name."""
        return self.decoder.weights()

    def pause(self) -> None:
        """Do nothing in ``step`` until ``resume``; running rows keep their place."""
        self.paused = True

    def resume(self) -> None:
        """Go on after ``pause``."""
        self.paused = False

    def sleep(self) -> None:
        """Free the cache; refused while rows run."""
        if self.rows:
            raise RuntimeError(
                f"engine: {len(self.rows)} rows are running; finish or abort them before sleep."
            )
        self.cache, self.asleep = None, True

    def wake(self) -> None:
        """Serve again; the cache is allocated with the first prompt."""
        self.asleep = False


def _grown(size: int, needed: int, *, most: int) -> int:
    """``size`` if it is enough, else at least twice it, so that growing costs little in all."""
    return size if needed <= size else min(most, max(needed, 2 * size))
