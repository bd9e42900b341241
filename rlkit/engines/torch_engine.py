"""TorchEngine: generation in plain torch; slots are refilled as rows finish."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlkit.algo.logprobs import rows_at_once
from rlkit.engines.base import BaseEngine
from rlkit.engines.fused import FusedDecoder
from rlkit.engines.kv_cache import Decode, KVCache, Prefill
from rlkit.engines.requests import OnToken, Request, Response
from rlkit.engines.sampling import Cut, noise, sample
from rlkit.engines.slots import Row, Slots
from rlkit.engines.stops import GrowingText
from rlkit.models.attention import positions
from rlkit.models.pretrained import Pretrained
from rlkit.shield import shield

RECOMPUTED_TOKENS = 16_384
"""Tokens of running rows, padding included, that new weights read at once."""


class TorchEngine(BaseEngine):
    """Continuous batching over at most ``max_rows`` slots of one model on one device.

    ``add`` requests at any time between two ``step`` calls, each of which samples one token for
    every running row and returns what finished. Weights may change between two steps as well. All
    of it from one thread. The cache of keys and values is as large as the requests so far needed.
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
        super().__init__(model, seed=seed, max_rows=max_rows, max_len=max_len)
        self.decoder = FusedDecoder(model.build(device=device, dtype=dtype))
        self.device, self.dtype = torch.device(device), dtype
        self.waiting: deque[Request] = deque()
        self.slots = Slots(self.device)
        self.cache: KVCache | None = None
        self.uids: set[int] = set()  # waiting or running
        self.stale = False

    # ---- requests ----

    @property
    def rows(self) -> list[Row]:
        """Running rows, by slot."""
        return self.slots.rows

    def first_versions(self) -> dict[int, int]:
        """Uid -> version of the first, oldest token of every running row."""
        versions = self.slots["versions"][:, :1].flatten().tolist()
        return {row.uid: version for row, version in zip(self.rows, versions, strict=True)}

    def _begin(self, requests: Sequence[Request]) -> None:
        self.waiting.extend(requests)
        self.uids.update(int(uid) for request in requests for uid in request.uids)

    def _unfinished(self) -> Collection[int]:
        return self.uids

    @torch.inference_mode()
    def abort(self, uids: Collection[int] | None = None) -> list[Response]:
        """Stop ``uids``, waiting or running, or everything: what running rows have sampled so far,
        with finish_reason ``abort``.

        Uids that are not here are passed over: they may have finished just now.
        """
        gone = set(self.uids) if uids is None else self.uids.intersection(uids)
        left = [
            replace(request, uids=[uid for uid in request.uids if uid not in gone])
            for request in self.waiting
        ]
        self.waiting = deque(request for request in left if request.uids)
        at = [slot for slot, row in enumerate(self.rows) if row.uid in gone]
        stopped = self._take_out(dict.fromkeys(at, "abort"))
        self.uids -= gone
        return stopped

    # ---- work ----

    @torch.inference_mode()
    def step(self, *, on_token: OnToken | None = None) -> list[Response]:
        """One token for every running row, after admitting waiting prompts to free slots.

        Returns finished responses. After an error in it, ``abort``.
        """
        self._check_not_asleep()
        if self.paused:
            return []
        if self.stale:
            self._recompute()
        running = len(self.rows)
        hidden = [self._decode(running)] if running else []
        admitted = self._admit()
        if admitted:
            hidden.append(self._prefill(admitted, first_slot=running))
        if not self.rows:
            return []
        tokens, logprobs = self._sample(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
        uids = [row.uid for row in self.rows] if on_token else []
        finished = self._take_out(self.slots.record(tokens, logprobs, version=self.version))
        if on_token:
            for token in zip(uids, tokens.tolist(), logprobs.tolist(), strict=True):
                on_token(*token)
        return finished

    def _sample(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [rows] and logprobs [rows]; logits of a long vocabulary some rows at a time."""
        temperature, uniform, cut = (
            self.slots["temperature"],
            self.slots.uniform(),
            self.slots.cut(),
        )
        size, found = rows_at_once(self.spec.vocab_size), []
        for start in range(0, len(hidden), size):
            at = slice(start, start + size)
            limits = cut and Cut(*(limit[at] for limit in cut))
            logits = self.decoder.logits(hidden[at])  # [size, V]
            found.append(sample(logits, temperature[at], uniform[at], limits))
        tokens, logprobs = map(torch.cat, zip(*found, strict=True))
        return tokens, logprobs

    def _decode(self, num: int) -> Tensor:
        """Hidden states [num, H] after the last token of each running row."""
        assert self.cache is not None
        at = self.cache.lengths[:num].clone()
        hidden = self.decoder(self.slots.last(), at, Decode(self.cache, num))
        self.cache.lengths[:num] += 1
        return hidden

    def _admit(self) -> list[Request]:
        """Requests that fit into free slots, first come first served; a group is admitted whole."""
        admitted, rows, draws = [], [], []
        free = self.max_rows - len(self.rows)
        while self.waiting and len(self.waiting[0].uids) <= free:
            request = self.waiting.popleft()
            free -= len(request.uids)
            admitted.append(request)
            how = request.sampling
            draws += [*noise(self.seed, np.asarray(request.uids), how.max_new_tokens)]
            for uid in request.uids:
                text = GrowingText(self.tokenizer, how.stop) if how.stop else None
                rows.append(Row(uid, request.prompt_ids, how, text))
        if rows:
            self.slots.add(rows, draws)
        return admitted

    def _prefill(self, requests: Sequence[Request], *, first_slot: int) -> Tensor:
        """Hidden states [rows, H] after each prompt, a row a sample; a prompt itself runs once."""
        cache = self._cache_for(requests, used=first_slot)
        lengths = torch.tensor([len(r.prompt_ids) for r in requests])
        copies = torch.tensor([len(r.uids) for r in requests])
        first = first_slot + copies.cumsum(0) - copies  # [requests] slot of each group's first row
        ids = torch.tensor([t for r in requests for t in r.prompt_ids], device=self.device)
        hidden = self.decoder(ids, positions(lengths), Prefill(cache, lengths, first))
        last = hidden[(lengths.cumsum(0) - 1).to(self.device)]  # [requests, H]
        slots = torch.arange(first_slot, first_slot + int(copies.sum()))
        source = first.repeat_interleave(copies)
        cache.move(source[source != slots], slots[source != slots])
        return last.repeat_interleave(copies.to(self.device), dim=0)

    def _cache_for(self, requests: Sequence[Request], *, used: int) -> KVCache:
        """The cache, with room for ``requests`` beside the ``used`` rows that run."""
        slots = len(self.rows)
        length = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
        if self.cache is None:
            self.cache = KVCache(
                self.spec, num_slots=slots, max_len=length, device=self.device, dtype=self.dtype
            )
        else:
            most = self.max_rows, self.max_len
            self.cache.reserve(num_slots=slots, max_len=length, used=used, most=most)
        self.decoder.reserve(self.cache.max_len)
        return self.cache

    def _recompute(self) -> None:
        """Fill the cache of running rows again, under the weights of now.

        It holds all their tokens but the last, which the next decoding reads.
        """
        if self.rows:
            assert self.cache is not None
            known = self.cache.lengths[: len(self.rows)].clone()
            at_once = max(1, RECOMPUTED_TOKENS // int(known.max()))
            for slots in torch.arange(len(known)).split(at_once):
                ids = torch.cat([self.slots.written(slot)[:-1] for slot in slots.tolist()])
                lengths = known[slots]
                self.decoder(ids, positions(lengths), Prefill(self.cache, lengths, slots))
        self.stale = False

    def _take_out(self, reasons: Mapping[int, str]) -> list[Response]:
        """Responses of the slots in ``reasons``, which the last running rows then fill."""
        finished = [self.slots.response(slot, reason) for slot, reason in reasons.items()]
        if reasons:
            self.uids.difference_update(response.uid for response in finished)
            left = len(self.rows) - len(reasons)
            holes = torch.tensor([i for i in reasons if i < left], dtype=torch.long)
            movers = [i for i in range(left, len(self.rows)) if i not in reasons]
            if movers and self.cache is not None:
                self.cache.move(torch.tensor(movers), holes)
                self.slots.move(torch.tensor(movers), holes)
            del self.rows[left:]
        return finished

    # ---- weights and life cycle ----

    def load_weights(
        self, tensors: Mapping[str, Tensor], *, version: int, recompute: bool = True
    ) -> None:
        """Replace all weights between two tokens; running rows go on and keep their tokens, each
        with the version that sampled it.

        With ``recompute`` the next step first computes the cache of what is written again, so that
        the tokens from then on are those of the new weights alone; without, they attend to the keys
        and values of the old ones.
        """
        with shield:
            self.decoder.load_weights(tensors)
            self.version = version
            self.stale |= recompute

    def weights(self) -> dict[str, Tensor]:
        """Weights by Hugging Face name."""
        return self.decoder.weights()

    def sleep(self) -> None:
        """Hold no more than the weights; refused while rows run."""
        self._check_may_sleep(len(self.rows))
        self.cache, self.slots, self.asleep = None, Slots(self.device), True
        self.decoder.free()

    def wake(self) -> None:
        """Serve again; the cache is allocated with the first prompt."""
        self.asleep = False
