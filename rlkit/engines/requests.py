"""What an engine is asked for and gives back."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rlkit.config import SamplingParams

OnToken = Callable[[int, int, float], object]
"""(uid, token, logprob) of every token as it is sampled."""


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


def check_fits(request: Request, *, vocab_size: int, max_len: int, max_rows: int) -> None:
    """ValueError for a request that can never run."""
    length = len(request.prompt_ids) + request.sampling.max_new_tokens
    if not len(request.prompt_ids) or not len(request.uids):
        raise ValueError("request: got an empty prompt or no uids, need at least one of each.")
    if length > max_len:
        raise ValueError(
            f"request: got {len(request.prompt_ids)} prompt + {request.sampling.max_new_tokens} "
            f"new tokens, need at most {max_len}. Shorten the prompt or lower max_new_tokens."
        )
    bad = [t for t in request.prompt_ids if not 0 <= t < vocab_size]
    if bad:
        raise ValueError(f"request: got token ids {bad[:3]}, need ids from 0 to {vocab_size - 1}.")
    if len(request.uids) > max_rows:
        raise ValueError(
            f"request: got {len(request.uids)} samples of one prompt, need at most "
            f"max_rows={max_rows}."
        )


def check_unique(requests: Sequence[Request], *, taken: Collection[int]) -> None:
    """ValueError for a uid that two responses would have."""
    counts = Counter(uid for request in requests for uid in request.uids)
    twice = [uid for uid, num in counts.items() if num > 1 or uid in taken]
    if twice:
        raise ValueError(
            f"uids: got {twice[0]} more than once ({len(twice)} such), need one a response: "
            "equal uids draw equal tokens. Give each prompt of a call a group id of its own."
        )
