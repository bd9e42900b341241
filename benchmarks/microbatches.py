"""What dynamic micro-batches gain over a fixed number, on responses with a long tail of lengths.

    python benchmarks/microbatches.py

A forward and backward pass over the same rows, cut in different ways, in one process on one thread;
the best of several rounds. "fixed" is so many micro-batches of equal numbers of rows, in the order
in which they came, of which none may be over the budget; so their number is that which the
heaviest one needs. The others know the tokens. Ratios above 1 are quicker than "fixed".
"""

import time
from collections.abc import Callable

import numpy as np
import torch

import rlkit as rk
from rlkit import algo
from rlkit.batch import planning

ROWS, PROMPT_TOKENS, LONGEST, BUDGET, ROUNDS, CASES = 256, 10, 240, 1024, 4, 300
Cut = Callable[[np.ndarray, int], list[np.ndarray]]


def fixed(tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Equal numbers of rows: the fewest micro-batches of which none is over the budget."""
    for num in range(1, len(tokens) + 1):
        pieces = np.array_split(np.arange(len(tokens)), num)
        if all(tokens[piece].sum() <= budget for piece in pieces):
            return pieces
    raise ValueError(f"got a row of {tokens.max()} tokens, need at most {budget} in each.")


CUTS: dict[str, Cut] = {
    "fixed": fixed,
    "fill": planning.fill,
    "allocate": planning.allocate,
    "allocate_evenly": planning.allocate_evenly,
}


def long_tailed(rng: np.random.Generator, num: int) -> np.ndarray:
    """Response lengths: lognormal, median 24 tokens, sigma 1, cut at LONGEST."""
    return np.clip(24 * rng.lognormal(sigma=1.0, size=num), 1, LONGEST).astype(np.int64)


def batch_of(lengths: np.ndarray) -> rk.Batch:
    """Random tokens of these lengths, ready for a policy loss."""
    generator = torch.Generator().manual_seed(0)

    def ids(num: int) -> torch.Tensor:
        return torch.randint(4, 12, (num,), generator=generator)

    return rk.Batch.from_columns(
        {
            "prompt_ids": [ids(PROMPT_TOKENS) for _ in lengths],
            "response_ids": [ids(int(num)) for num in lengths],
            "response_mask": [torch.ones(int(num)) for num in lengths],
            "old_logprobs": [torch.zeros(int(num)) - 2 for num in lengths],
            "advantages": [torch.ones(int(num)) for num in lengths],
        }
    ).as_step()


def measure(batch: rk.Batch) -> dict[str, tuple[int, float]]:
    """Micro-batches and best seconds of each cut."""
    backend = rk.TorchBackend(rk.models.tiny())
    cuts = {name: cut(batch.num_tokens, BUDGET) for name, cut in CUTS.items()}
    seconds = {name: [] for name in cuts}
    for _ in range(1 + ROUNDS):  # in turns, so that a busy moment meets all of them; one to warm up
        for name, pieces in cuts.items():
            start = time.process_time()
            for piece in pieces:
                backend.forward_backward(batch.select(piece), algo.clipped_policy_loss)
            seconds[name].append(time.process_time() - start)
    return {name: (len(cuts[name]), min(times[1:])) for name, times in seconds.items()}


def balancers(rng: np.random.Generator) -> None:
    """The heaviest rank's tokens over the mean: Graham's greedy rule and Karmarkar-Karp."""
    print(f"\nheaviest of 8 ranks over the mean, {CASES} batches (measured; 1 is even)")
    print(f"{'rows':>6}{'greedy':>12}{'Karmarkar-Karp':>18}{'KK better':>12}{'KK worse':>12}")
    for rows in (16, 32, 64):
        loads = []
        for _ in range(CASES):
            tokens = long_tailed(rng, rows)
            cuts = planning.balance(tokens, 8), planning.karmarkar_karp(tokens, 8)
            heaviest = [max(tokens[part].sum() for part in parts) for parts in cuts]
            loads.append(np.array(heaviest) / (tokens.sum() / 8))
        greedy, differencing = np.array(loads).T
        shares = np.mean(differencing < greedy), np.mean(differencing > greedy)
        print(f"{rows:>6}{greedy.mean():12.4f}{differencing.mean():18.4f}", end="")
        print("".join(f"{share:12.2f}" for share in shares))


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    batch = batch_of(long_tailed(rng, ROWS))
    tokens = batch.num_tokens
    print(
        f"{ROWS} rows, {tokens.sum()} tokens: median {np.median(tokens):.0f}, longest "
        f"{tokens.max()}, budget {BUDGET} (measured)"
    )
    found = measure(batch)
    print(f"{'cut':18}{'micro-batches':>16}{'CPU s':>10}{'ratio to fixed':>18}")
    for name, (num, seconds) in found.items():
        print(f"{name:18}{num:16}{seconds:10.3f}{found['fixed'][1] / seconds:18.2f}")
    balancers(rng)


if __name__ == "__main__":
    main()
