"""A micro-batch as one packed sequence of tokens.

Prompt and response of each row, end to end, no padding.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkit.algo.logprobs import next_token_rows
from rlkit.batch import Batch
from rlkit.batch.rows import Rows
from rlkit.models.attention import positions


@dataclass(frozen=True, slots=True)
class Packed:
    """S rows of N tokens in all, M of them response tokens."""

    ids: Tensor
    """[N] int64, on the device."""
    lengths: Tensor
    """[S] int64: tokens of each row that the model reads."""
    predict: Tensor
    """[M] int64: place in ``ids`` whose logits predict each response token."""
    targets: Rows
    """Response tokens of the S rows."""
    temperature: Tensor
    """[M] fp32: sampling temperature of each response token."""


def pack(batch: Batch, *, device: torch.device) -> Packed:
    """Pack prompt_ids and response_ids of a batch.

    A response's last token predicts nothing and is left out.
    """
    prompts, responses = (
        batch._column("prompt_ids").load(batch.uids),
        batch._column("response_ids").load(batch.uids),
    )
    if len(batch) and int(prompts.row_lengths.min()) < 1:
        raise ValueError(
            "prompt_ids: got an empty prompt, need at least one token to predict the response from."
        )
    read = (responses.row_lengths - 1).clamp(min=0)
    pieces = [
        piece
        for prompt, response, n in zip(
            prompts.unpack(), responses.unpack(), read.tolist(), strict=True
        )
        for piece in (prompt, response[:n])
    ]
    lengths = prompts.row_lengths + read
    starts = lengths.cumsum(0) - lengths
    temperature = torch.ones(len(batch))
    if "temperature" in batch:
        temperature = batch["temperature"].to("cpu", torch.float32)
    return Packed(
        ids=torch.cat(pieces).to(device)
        if pieces
        else torch.zeros(0, dtype=torch.int64, device=device),
        lengths=lengths,
        predict=next_token_rows(starts, prompts.row_lengths, responses.row_lengths).to(device),
        targets=Rows(responses.tensor.to(device), responses.row_lengths),
        temperature=temperature.repeat_interleave(responses.row_lengths).to(device),
    )


def padded(packed: Packed, *, multiple: int) -> Packed:
    """``packed`` with tokens after the end of each sequence, which nothing is read from, so that
    every length is a multiple.
    """
    lengths = packed.lengths + -packed.lengths % multiple
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(packed.lengths)
    place = (starts + positions(packed.lengths)).to(packed.ids.device)  # [N] of each token
    ids = packed.ids.new_zeros(int(lengths.sum())).index_copy(0, place, packed.ids)
    return replace(packed, ids=ids, lengths=lengths, predict=place[packed.predict])


def filled(packed: Packed | None, *, multiple: int, device: torch.device) -> Packed:
    """``packed`` (None: no rows) with one more sequence at the end, which nothing is read from, so
    that N is a multiple, and not 0.
    """
    if packed is None:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        lengths, real = torch.zeros(0, dtype=torch.int64), torch.zeros(0, device=device)
        packed = Packed(none, lengths, none, Rows(none, lengths), real)
    num = len(packed.ids)
    more = -num % multiple if num else multiple
    if not more:
        return packed
    ids = torch.cat([packed.ids, packed.ids.new_zeros(more)])
    return replace(packed, ids=ids, lengths=torch.cat([packed.lengths, torch.tensor([more])]))
