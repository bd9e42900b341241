"""Batches for tests of losses, and a loss added up over the parts of a step."""

import functools

import torch
from hypothesis import strategies as st

from rlkit.algo import (
    cispo_loss,
    clipped_policy_loss,
    clipped_value_loss,
    decoupled_policy_loss,
    entropy_bonus,
    gmpo_loss,
    gspo_loss,
    kl_penalty,
    sapo_loss,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from rlkit.batch import Batch

AGGREGATES = (
    token_mean,
    seq_mean_token_mean,
    seq_mean_token_sum,
    functools.partial(seq_mean_token_sum, length=8),
)


POLICY_LOSSES = {
    "clipped": clipped_policy_loss,
    "dual clip": functools.partial(clipped_policy_loss, dual_clip=3.0),
    "decoupled": decoupled_policy_loss,
    "gspo": gspo_loss,
    "gmpo": gmpo_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
}
LOSSES = POLICY_LOSSES | {
    "value": clipped_value_loss,
    "kl": functools.partial(kl_penalty, coef=0.1),
    "entropy": functools.partial(entropy_bonus, coef=0.1),
}


def of_ratios(ratios, advantages, *, mask=None):
    """Logprobs [B, T] that ask for a gradient, and the batch, for given ratios and advantages."""
    ratios, advantages = torch.tensor(ratios), torch.tensor(advantages)
    old = torch.full_like(ratios, -1.0)
    batch = Batch.from_columns(
        {
            "response_mask": torch.ones_like(ratios) if mask is None else torch.tensor(mask),
            "old_logprobs": old,
            "rollout_logprobs": old,
            "advantages": advantages,
        }
    )
    return (old + ratios.log()).requires_grad_(), batch


def gradient(loss, logprobs):
    return torch.autograd.grad(loss, logprobs)[0]


@st.composite
def steps(draw):
    """A batch of one to three groups of ragged rows, and a logprob for each of its tokens."""
    num_rows = draw(st.integers(2, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = torch.randint(1, 6, (num_rows,), generator=generator).tolist()

    def column(dtype=torch.float64):
        return [torch.randn(n, generator=generator, dtype=dtype) for n in lengths]

    mask = [torch.rand(n, generator=generator) < 0.8 for n in lengths]
    groups = torch.randint(0, 3, (num_rows,), generator=generator).tolist()
    batch = Batch.from_columns(
        {
            "group_ids": groups,
            "response_ids": [torch.arange(n) for n in lengths],
            "response_mask": mask,
            "old_logprobs": column(),
            "advantages": column(),
            "rollout_logprobs": column(),
            "ref_logprobs": column(),
            "values": column(),
            "returns": column(),
        }
    )
    table = torch.randn(num_rows, max(lengths), generator=generator, dtype=torch.float64)
    return batch, table  # table[uid, t]: the logprob of that token


def summed(parts, table, loss_fn=clipped_policy_loss, **options):
    """Loss, metrics and gradient, added up over parts of a step."""
    table = table.clone().requires_grad_()
    totals, loss = {}, torch.zeros((), dtype=table.dtype)
    for part in parts:
        width = int(part.lengths("response_ids").max())
        share, metrics = loss_fn(table[part.uids, :width], part, **options)
        loss = loss + share
        for name, value in metrics.items():
            before = totals.get(name, torch.zeros(()))
            totals[name] = torch.maximum(before, value) if name.endswith("_max") else before + value
    return loss, totals, gradient(loss, table)
