"""What an engine is asked for and gives back."""

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """[L] fp32, of each token when it was sampled, at the sampling temperature, among all tokens:
    what a trainer computes. top_k, top_p and min_p don't change them (raw, as vLLM would say): the
    probability a token was drawn with is higher, by the share that was cut off.
    """
    token_version: Tensor
    """[L] int64: the policy version that sampled each token."""
    finish_reason: str
    """stop, length or abort."""
    sampling: SamplingParams
    """How it was sampled."""
    stop_reason: int | str | None = None
    """The token or the string that stopped it."""
    text: str | None = None
    """What it says before the stop string; None if its sampling names no stop strings."""

    @property
    def temperature(self) -> float:
        """Sampling temperature."""
        return self.sampling.temperature
