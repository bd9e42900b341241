"""From logits to logprobs and entropy, and the one place that knows of the shift by one.

A decoder's logits at position s predict the token at position s + 1. ``next_token_rows`` is that
shift; everywhere else row t of the logits already *predicts* ``tokens[t]``.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

LOGITS_AT_ONCE = 8_000_000
"""Logits that are made at a time, 31 MiB in float32: 52 rows of a vocabulary of 152 thousand. Twice
that are held, for entropies five times."""


def rows_at_once(vocab_size: int) -> int:
    """Rows whose logits are made at a time."""
    return max(1, LOGITS_AT_ONCE // vocab_size)


def next_token_rows(
    starts: Int[Tensor, " B"],
    prompt_lengths: Int[Tensor, " B"],
    response_lengths: Int[Tensor, " B"],
) -> Int[Tensor, " N"]:
    """For each response token, the row of the packed logits that predicts it.

    Sequence i lies at starts[i] of the packed tokens, its prompt and then its response. Token t of
    the response lies at starts[i] + prompt_lengths[i] + t, and the row before it predicts it.
    All arguments [B]; returns [N], N the sum of response_lengths, responses in order.
    """
    if len(prompt_lengths) and int(prompt_lengths.min()) < 1:
        raise ValueError(
            f"prompt_lengths: got {int(prompt_lengths.min())}, need at least 1: no row of logits "
            "predicts the first token of a sequence. Begin each prompt with a token, such as a "
            "start-of-text token."
        )
    first = starts + prompt_lengths - 1  # row that predicts token 0 of each response
    offset = response_lengths.cumsum(0) - response_lengths  # where it goes in the result
    within = torch.arange(int(response_lengths.sum()), device=starts.device)
    return (first - offset).repeat_interleave(response_lengths) + within


def logprobs_from_logits(
    logits: Float[Tensor, "*N V"],
    tokens: Int[Tensor, "*N"],
    *,
    temperature: int | float | Tensor = 1.0,
) -> Float[Tensor, "*N"]:
    """Log-probability of each token: its logit minus the logsumexp of its row.

    logits [N, V] or [B, T, V], row t *predicts* tokens[t]; tokens [N] or [B, T] -> the same shape,
    at least float32. temperature divides the logits and must be the one that sampled: a number, or
    a tensor of the leading axes of tokens ([N], or [B] or [B, T]). 0 marks greedy sampling, whose
    own logprobs would all be 0: it counts as 1, the model's distribution.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens: got shape {tuple(tokens.shape)}, need {tuple(logits.shape[:-1])}, one a row "
            "of logits. Pick the rows that predict them with next_token_rows."
        )
    every = _over_temperature(logits, temperature).log_softmax(-1)  # [*N, V]
    return every.gather(-1, tokens[..., None])[..., 0]


def entropy_from_logits(
    logits: Float[Tensor, "*N V"], *, temperature: int | float | Tensor = 1.0
) -> Float[Tensor, "*N"]:
    """Entropy in nats of each row's distribution, −∑ p log p.

    logits [N, V] or [B, T, V] -> [N] or [B, T], at least float32; temperature as in
    ``logprobs_from_logits``. Tokens ruled out by a logit of −inf add nothing, to value or gradient.
    """
    return _entropy(_over_temperature(logits, temperature).log_softmax(-1))


def _entropy(every: Tensor) -> Tensor:
    """Entropies [*N] from the logprobs [*N, V] of all tokens."""
    lowest = torch.finfo(every.dtype).min  # not -inf: 0 * -inf is NaN
    return -(every.exp() * every.clamp(min=lowest)).sum(-1)


def per_token_from_hidden(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    tokens: Int[Tensor, " N"],
    *,
    temperature: int | float | Tensor = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs [N], and entropies [N] if asked for, else none, of the logits hidden @ headᵀ.

    [N, V] is never held: the logits of some rows at a time are made, and made again for the
    gradient (Chen et al., 2016, of activations), which can be taken once.
    """
    scaled = _over_temperature(hidden, temperature).to(head.dtype)  # [N, H]: as good as the logits
    apply = cast(Callable[..., tuple[Tensor, Tensor]], _PerToken.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(scaled, head, tokens, entropy)


class _PerToken(torch.autograd.Function):
    """``per_token_from_hidden`` at temperature 1, with its gradient.

    By the logits that of a logprob is onehot − p, and that of an entropy H is −p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        size, room = rows_at_once(len(head)), _room(hidden, head)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        for start in range(0, max(1, len(hidden)), size):
            rows = slice(start, start + size)
            every = _all_logprobs(hidden[rows], head, *room)  # [n, V]
            logprobs.append(every.gather(1, tokens[rows, None])[:, 0])
            entropies.append(_entropy(every) if entropy else every.new_empty(0))
        # The last piece is still there when its gradient, the first of all, is wanted.
        found = torch.cat(logprobs), torch.cat(entropies)
        ctx.save_for_backward(hidden, head, tokens, found[1], room[1])
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, head, tokens, entropies, room = ctx.saved_tensors
        given, entropy_slope = grad_outputs  # None for what the loss makes no use of
        slope: Tensor = room.new_zeros(len(tokens)) if given is None else given
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        size, logits = rows_at_once(len(head)), None
        for start in reversed(range(0, max(1, len(hidden)), size)):
            rows = slice(start, start + size)
            every = room[: len(hidden[rows])]
            if start + size < len(hidden):
                logits = _room(hidden, head)[0] if logits is None else logits
                _all_logprobs(hidden[rows], head, logits, room)
            up = slope[rows, None]  # [n, 1]
            if entropy_slope is not None and len(entropies):
                up = (every + entropies[rows, None]).mul_(entropy_slope[rows, None]).add_(up)
            less = every.exp_().mul_(up).scatter_add_(1, tokens[rows, None], -slope[rows, None])
            less = less.to(head.dtype)  # [n, V], 0 less the gradient by the logits
            of_hidden[rows] = -(less @ head)
            if of_head is not None:
                of_head.addmm_(less.t(), hidden[rows], alpha=-1)
        return of_hidden, of_head, None, None


def _room(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Where a piece's logits go, and logprobs, in at least float32: pages to touch but once."""
    logits = head.new_empty(min(len(hidden), rows_at_once(len(head))), len(head))
    return logits, torch.empty_like(logits, dtype=torch.promote_types(head.dtype, torch.float32))


def _all_logprobs(hidden: Tensor, head: Tensor, logits: Tensor, out: Tensor) -> Tensor:
    """Logprobs [n, V] of all tokens after hidden states [n, H], in the first rows of ``out``."""
    logits, out = logits[: len(hidden)], out[: len(hidden)]
    torch.mm(hidden, head.t(), out=logits)
    return torch.log_softmax(logits, -1, dtype=out.dtype, out=out)


def in_pieces(
    piece: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Float[Tensor, "N H"],
    tokens: Int[Tensor, " N"],
    temperature: Shaped[Tensor, " N"],
    *,
    num_rows: int,
) -> tuple[Tensor, Tensor]:
    """``piece`` of ``num_rows`` rows at a time, end to end; computed again for the gradient."""
    if len(hidden) <= num_rows:
        return piece(hidden, tokens, temperature)
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(hidden), num_rows):
        rows = [x[start : start + num_rows] for x in (hidden, tokens, temperature)]
        again = checkpoint(  # pyright: ignore[reportUnknownVariableType]
            piece, *rows, use_reentrant=False, preserve_rng_state=False
        )
        found.append(cast(tuple[Tensor, Tensor], again))
    return torch.cat([one for one, _ in found]), torch.cat([other for _, other in found])


def _over_temperature(logits: Tensor, temperature: int | float | Tensor) -> Tensor:
    """Logits in at least float32 over the temperature; 0 counts as 1. Copies only if it must."""
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    if not isinstance(temperature, Tensor):
        if not temperature >= 0:
            raise ValueError(
                f"temperature: got {temperature}, need a number >= 0. Pass the one that sampled "
                "(0 is greedy)."
            )
        return logits if temperature in (0, 1) else logits / temperature
    lead = logits.shape[: temperature.ndim]
    if temperature.ndim >= logits.ndim or temperature.shape != lead:
        raise ValueError(
            f"temperature: got shape {tuple(temperature.shape)}, need a number or the leading axes "
            f"of {tuple(logits.shape[:-1])}. Pass batch['temperature'] of the same rows."
        )
    safe = torch.where(temperature == 0, 1.0, temperature).to(logits.dtype)
    return logits / safe.reshape(*lead, *[1] * (logits.ndim - safe.ndim))
