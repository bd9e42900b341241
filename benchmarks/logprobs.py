"""What logits in pieces cost and save: seconds and peak memory at a vocabulary of 150 thousand.

    python benchmarks/logprobs.py --tokens 1024

Logprobs and entropies of random hidden states, with their gradient, all at once and in pieces as
the backend does it. Each way in a process of its own, so that the peak is its own; one thread.
"""

import argparse
import time

import pandas as pd
import torch
from torch import multiprocessing

from rlkit import device
from rlkit.algo import logprobs, per_token_from_hidden


def measure(queue, at_once: int, args: argparse.Namespace) -> None:
    """Seconds and MiB of one way."""
    torch.set_num_threads(1)
    logprobs.LOGITS_AT_ONCE = at_once
    head = torch.nn.Linear(args.hidden, args.vocab, bias=False)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    tokens = torch.randint(args.vocab, (args.tokens,))
    device.reset_peak("cpu")
    before = device.allocated_bytes("cpu")
    for _ in range(2):  # the first touches memory for the first time
        start = time.perf_counter()
        found = per_token_from_hidden(hidden, head.weight, tokens, entropy=True)
        torch.cat(found).sum().backward()
        seconds = time.perf_counter() - start
    queue.put((seconds, (device.peak_bytes("cpu") - before) / 2**20))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=150_000)
    args = parser.parse_args()
    spawn, rows = multiprocessing.get_context("spawn"), []
    ways = {"all at once": args.tokens * args.vocab, "in pieces": logprobs.LOGITS_AT_ONCE}
    for way, at_once in ways.items():
        queue = spawn.Queue()
        process = spawn.Process(target=measure, args=(queue, at_once, args))
        process.start()
        seconds, mib = queue.get(timeout=600)
        process.join()
        rows.append({"logits": way, "seconds": seconds, "peak MiB": mib})
    frame = pd.DataFrame(rows)
    print(frame.assign(ratio=frame["peak MiB"] / frame["peak MiB"][0]).round(2).to_string())


if __name__ == "__main__":
    main()
