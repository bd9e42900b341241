"""Running rows by slot: what they have sampled, and how they sample.

Tensors, so that a step costs a few operations however many rows run; row i sits in slot i, here and
in the cache.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlkit.config import SamplingParams
from rlkit.engines.requests import Response
from rlkit.engines.sampling import Cut
from rlkit.engines.stops import GrowingText

PER_TOKEN = {
    "tokens": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "draws": torch.float64,
}
"""[slots, longest response]; draws are the uniform numbers that tokens are sampled with."""
PER_ROW = {
    "counts": torch.int64,
    "limits": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
}
"""[slots]; counts are tokens sampled so far."""


class Row:
    """What is not a number of a running response."""

    __slots__ = ("prompt_ids", "sampling", "text", "uid")

    def __init__(
        self,
        uid: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        text: GrowingText | None,
    ) -> None:
        self.uid, self.prompt_ids, self.sampling, self.text = int(uid), prompt_ids, sampling, text


class Slots:
    """Running rows; they are the first slots of every tensor."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.data = {
            name: torch.zeros((0, 0) if name in PER_TOKEN else 0, dtype=dtype, device=device)
            for name, dtype in (PER_TOKEN | PER_ROW).items()
        }
        self.stops = torch.zeros((0, 0), dtype=torch.int64, device=device)  # filled up with -1

    def __getitem__(self, name: str) -> Tensor:
        """One column of the running rows."""
        return self.data[name][: len(self.rows)]

    def add(self, rows: Sequence[Row], draws: Sequence[np.ndarray]) -> None:
        """Rows that begin, each with its draws [max_new_tokens]."""
        first, all_of = len(self.rows), [row.sampling for row in rows]
        self._reserve(
            first + len(rows),
            longest=max(s.max_new_tokens for s in all_of),
            stops=max(len(s.stop_token_ids) for s in all_of),
        )
        self.rows += rows
        self["counts"][first:] = 0
        for name, values in (
            ("limits", [s.max_new_tokens for s in all_of]),
            ("temperature", [s.temperature for s in all_of]),
            ("top_k", [s.top_k for s in all_of]),
            ("top_p", [s.top_p for s in all_of]),
            ("min_p", [s.min_p for s in all_of]),
        ):
            self[name][first:] = torch.tensor(values, dtype=PER_ROW[name])
        width = self.stops.shape[1]
        stops = [[*s.stop_token_ids, *[-1] * (width - len(s.stop_token_ids))] for s in all_of]
        self.stops[first : len(self.rows)] = torch.tensor(stops, dtype=torch.int64)
        wide = np.zeros((len(rows), self.data["draws"].shape[1]))
        for i, draw in enumerate(draws):
            wide[i, : len(draw)] = draw
        self["draws"][first:] = torch.from_numpy(wide)

    def _reserve(self, num: int, *, longest: int, stops: int) -> None:
        """Room for ``num`` rows of ``longest`` tokens and ``stops`` stop tokens."""
        slots, length = self.data["tokens"].shape
        if num > slots or longest > length:
            slots = max(num, 2 * slots) if num > slots else slots
            length = max(longest, 2 * length) if longest > length else length
            for name, old in self.data.items():
                shape = (slots, length) if name in PER_TOKEN else (slots,)
                self.data[name] = _wider(old, shape, fill=0)
        if num > len(self.stops) or stops > self.stops.shape[1]:
            self.stops = _wider(self.stops, (slots, max(stops, self.stops.shape[1])), fill=-1)

    def uniform(self) -> Tensor:
        """[rows] the number that each row's next token is sampled with."""
        return self["draws"].gather(1, self["counts"][:, None])[:, 0]

    def cut(self) -> Cut | None:
        """Where rows cut tokens off, None if none does."""
        if not any(row.sampling.cuts for row in self.rows):
            return None
        return Cut(self["top_k"], self["top_p"], self["min_p"])

    def last(self) -> Tensor:
        """[rows] the newest token of each."""
        return self["tokens"].gather(1, self["counts"][:, None] - 1)[:, 0]

    def written(self, slot: int) -> Tensor:
        """Prompt and tokens of a row."""
        tokens = self.data["tokens"][slot, : int(self.data["counts"][slot])]
        return torch.cat((tokens.new_tensor([*self.rows[slot].prompt_ids]), tokens))

    def record(self, tokens: Tensor, logprobs: Tensor, *, version: int) -> dict[int, str]:
        """Append a token to every row [rows]; returns slot -> finish reason of those that ended."""
        counts = self["counts"]
        at = counts[:, None]
        self["tokens"].scatter_(1, at, tokens[:, None])
        self["logprobs"].scatter_(1, at, logprobs[:, None])
        self["versions"].scatter_(1, at, version)
        counts += 1
        stopped = (self.stops[: len(self.rows)] == tokens[:, None]).any(1)
        ended = (stopped | (counts == self["limits"])).nonzero()[:, 0]
        done = {
            slot: "stop" if stop else "length"
            for slot, stop in zip(ended.tolist(), stopped[ended].tolist(), strict=True)
        }
        texts = [(slot, row.text) for slot, row in enumerate(self.rows) if row.text]
        if texts:
            news = tokens.tolist()
            done |= {slot: "stop" for slot, text in texts if text.push(news[slot])}
        return done

    @torch.inference_mode(False)  # its tensors may enter a gradient
    def response(self, slot: int, reason: str) -> Response:
        """What there is of a row, ended for ``reason``."""
        row, num = self.rows[slot], int(self.data["counts"][slot])
        tokens, logprobs, versions = (
            self.data[name][slot, :num].to("cpu", copy=True)
            for name in ("tokens", "logprobs", "versions")
        )
        found: int | str | None = None
        if reason == "stop":
            last = int(tokens[-1])
            found = last if last in row.sampling.stop_token_ids else row.text and row.text.found
        return Response(
            uid=row.uid,
            token_ids=tokens,
            logprobs=logprobs,
            token_version=versions,
            finish_reason=reason,
            sampling=row.sampling,
            stop_reason=found,
            text=row.text.text if row.text else None,
        )

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` [N] onto slots ``target`` [N]."""
        for tensor in [*self.data.values(), self.stops]:
            tensor[target.to(tensor.device)] = tensor[source.to(tensor.device)]
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            self.rows[new] = self.rows[old]


def _wider(old: Tensor, shape: tuple[int, ...], *, fill: int) -> Tensor:
    """``old`` in the first corner of a larger tensor."""
    new = old.new_full(shape, fill)
    new[tuple(slice(size) for size in old.shape)] = old
    return new
