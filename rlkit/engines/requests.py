"""What an engine is asked for and gives back, and a response while it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlkit.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the uids of the responses wanted for it."""

    prompt_ids: Sequence[int]
    uids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Response:
    """One finished response of L tokens."""

    uid: int
    token_ids: Tensor
    """[L] int64."""
    logprobs: Tensor
    """[L] fp32, of each token when it was sampled, at the sampling temperature."""
    token_version: Tensor
    """[L] int64: the policy version that sampled each token."""
    finish_reason: str
    """stop, length or abort."""
    temperature: float


class Row:
    """A running response."""

    __slots__ = ("draws", "logprobs", "sampling", "tokens", "uid", "versions")

    def __init__(self, uid: int, sampling: SamplingParams, draws: np.ndarray) -> None:
        self.uid, self.sampling, self.draws = int(uid), sampling, draws
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []

    @property
    def last(self) -> int:
        """The newest token."""
        return self.tokens[-1]

    @property
    def finish_reason(self) -> str:
        """Why it is complete; empty while it is not."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) == self.sampling.max_new_tokens else ""

    @torch.inference_mode(False)  # its tensors may enter a gradient
    def response(self, reason: str) -> Response:
        """What there is of it, ended for ``reason``."""
        return Response(
            uid=self.uid,
            token_ids=torch.tensor(self.tokens, dtype=torch.int64),
            logprobs=torch.tensor(self.logprobs, dtype=torch.float32),
            token_version=torch.tensor(self.versions, dtype=torch.int64),
            finish_reason=reason,
            temperature=self.sampling.temperature,
        )
