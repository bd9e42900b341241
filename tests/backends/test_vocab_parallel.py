"""Logprobs and entropies of a vocabulary cut over ranks, here threads that wait for each other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rlkit.algo import entropy_from_logits, logprobs_from_logits
from rlkit.backends.vocab_parallel import Ranks, logprobs_and_entropy

V, M = 11, 6


class Meeting:
    """Sums and maxima over threads; a sum's gradient goes through unchanged."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.seen = size, threading.Barrier(size), {}

    def gather(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.barrier.wait(timeout=20)
        self.seen[rank] = tensor.detach()
        self.barrier.wait(timeout=20)
        return [self.seen[i] for i in range(self.size)]

    def ranks(self, rank: int, columns: int) -> Ranks:
        total = lambda x: x + sum(self.gather(rank, x)) - x.detach()
        highest = lambda x: torch.stack(self.gather(rank, x)).amax(0)
        return Ranks(rank * columns, V, total, highest)


def cut(padded: int, size: int):
    """Whole logits, and each rank's (logprobs, entropies, gradient) of one loss of both."""
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(M, V, generator=generator)
    targets = torch.randint(V, (M,), generator=generator)
    temperature = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0, 1.3])
    wide = torch.cat([logits, 50 * torch.ones(M, padded - V)], 1)
    meeting = Meeting(size)

    def work(rank: int):
        mine = wide.chunk(size, 1)[rank].clone().requires_grad_()
        ranks = meeting.ranks(rank, padded // size)
        found = logprobs_and_entropy(mine, targets, temperature, ranks, entropy=True)
        (found[0].sum() + 0.3 * found[1].square().sum()).backward()
        return *(each.detach() for each in found), mine.grad

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(work, range(size)))
    return logits.requires_grad_(), targets, temperature, ranks


@pytest.mark.parametrize(("padded", "size"), [(11, 1), (12, 2), (12, 3), (24, 2), (32, 4)])
def test_every_rank_has_the_numbers_and_its_part_of_the_gradient_of_whole_rows(padded, size):
    logits, targets, temperature, ranks = cut(padded, size)
    logprobs = logprobs_from_logits(logits, targets, temperature=temperature)
    entropies = entropy_from_logits(logits, temperature=temperature)
    (logprobs.sum() + 0.3 * entropies.square().sum()).backward()
    for found, entropy, _ in ranks:
        torch.testing.assert_close(found, logprobs.detach())
        torch.testing.assert_close(entropy, entropies.detach())
    grads = torch.cat([grad for _, _, grad in ranks], 1)
    torch.testing.assert_close(grads[:, :V], logits.grad)
    assert not grads[:, V:].any()  # padding has no gradient
