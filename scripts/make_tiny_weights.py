"""Warm up the tiny model by supervised learning and write the folder that
``rk.models.tiny(pretrained=...)`` loads.

The text shows a row of digits followed by one of four behaviours, equally often: ascending sort,
descending sort, copy, reversal. The reward of ``rk.tasks.reverse_digits`` wants reversal alone, so
that the model starts right in about one response of five and reinforcement learning has something
to bring out.

    python scripts/make_tiny_weights.py                 # rewrites
    rlkit/models/weights/reverse_digits
"""

import argparse
import random
import time

import torch

import rlkit as rk
from rlkit.backends import TorchBackend
from rlkit.models.tiny import WEIGHTS
from rlkit.tasks.generated import BEHAVIOURS
from rlkit.tasks.score import judge


def demonstrations(task: rk.tasks.Task, indices: range, rng: random.Random) -> rk.Batch:
    """Training prompts with a random behaviour's response to each."""
    prompts = [task.item(i)[0] for i in indices]
    tokenizer = task.tokenizer
    responses = [rng.choice(BEHAVIOURS)(prompt.rstrip(">")) for prompt in prompts]
    ids = [
        torch.tensor([*tokenizer.encode(text, bos=False), tokenizer.eos_id]) for text in responses
    ]
    return rk.Batch.from_columns(
        {
            "prompt_ids": [torch.tensor(tokenizer.encode(prompt)) for prompt in prompts],
            "response_ids": ids,
            "response_mask": [torch.ones(len(x), dtype=torch.int8) for x in ids],
        }
    )


def cross_entropy(
    logprobs: torch.Tensor, batch: rk.Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean negative log-likelihood of the demonstrated tokens."""
    return batch.token_mean(-logprobs), {}


def accuracy(model: rk.models.Pretrained, task: rk.tasks.Task, *, temperature: float) -> float:
    """Share of 1,024 held-out prompts answered right."""
    worker = rk.RolloutWorker(model, max_new_tokens=12, max_rows=1024)
    batch = worker.generate(task.held_out(1024), temperature=temperature)
    return float(judge(task.verify, batch["prompt"], batch["response"], batch["answer"]).mean())


def main() -> None:
    """Train until the sampled accuracy reaches the target, then save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=6)
    parser.add_argument("--target", type=float, default=0.2, help="sampled accuracy to stop at")
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(WEIGHTS / "reverse_digits"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # the numbers of a run depend on it
    task = rk.tasks.reverse_digits(length=args.length, seed=1_000 + args.seed)
    model, rng, start = rk.models.tiny(seed=args.seed), random.Random(args.seed), time.time()
    optim = rk.OptimConfig(weight_decay=0.01, lr_schedule=rk.config.constant(warmup_steps=20))
    backend = TorchBackend(model, lr=1e-3, optim=optim)
    for step in range(args.max_steps):
        batch = demonstrations(task, range(step * 128, (step + 1) * 128), rng).as_step()
        metrics = backend.forward_backward(batch, cross_entropy)
        backend.step()
        if step % 25 == 24:
            model = rk.models.Pretrained(model.spec, model.tokenizer, backend.state_dict())
            right = accuracy(model, task, temperature=1.0)
            print(f"step {step + 1} loss {metrics['loss']:.3f} sampled accuracy {right:.3f}")
            if right >= args.target:
                break
    half = {name: tensor.to(torch.bfloat16) for name, tensor in backend.state_dict().items()}
    folder = rk.models.Pretrained(model.spec, model.tokenizer, half).save(args.out)
    saved = rk.models.load(folder)
    saved.weights = {name: tensor.float() for name, tensor in saved.weights.items()}
    print(
        f"{folder}: {step + 1} steps, {time.time() - start:.0f} s, sampled accuracy "
        f"{accuracy(saved, task, temperature=1.0):.3f}, greedy "
        f"{accuracy(saved, task, temperature=0.0):.3f}"
    )


if __name__ == "__main__":
    main()
