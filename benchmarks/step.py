"""One GRPO step of rlkit beside one of TRL's GRPOTrainer: tokens per second and peak memory.

    python -m venv --system-site-packages .venv-trl && .venv-trl/bin/pip install trl==1.16.0
    .venv-trl/bin/python benchmarks/step.py --models 5M 135M

(In an environment that has rlkit; TRL is no dependency of it.) Both train the same random weights
on the same prompts: 16 tokens, 8 responses of equal length each, one optimizer step of AdamW,
fp32, one thread. Neither has a reference model, and the logprobs of the first and only step stand
for the old ones. TRL generates with transformers; when it is timed it computes activations again,
as is its default, unless ``--keep-activations`` says otherwise, its quicker and larger way.

Each system is a process. They take turns step by step; a ratio is that of two medians, CPU ratios
are those of CPU seconds, which other work on the machine disturbs less. Memory is two more passes
of one step, in which every large block goes back to the system when it is freed: both systems keep
activations, then both compute them again. It is the highest resident bytes of a step above those
before it, so activations, logits, gradients (their bytes stand beside) and what generation holds
meanwhile.
The train step's rate is 6 FLOP a weight and token (forward and backward; embeddings and logits of
tokens that predict a response only) over that of a large matmul in the same turn.
"""

import os

os.environ.pop("OPENBLAS_CORETYPE", None)  # it may force kernels of another processor
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import functools
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
from generate import PROMPT_TOKENS, SPECS
from torch import multiprocessing

import rlkit as rk
from rlkit import trace
from rlkit.algo import clipped_policy_loss, group_relative

SAMPLES, LR = 8, 1e-5
PROMPTS = {"5M": 8, "135M": 2}
RESPONSE_TOKENS = {"5M": 64, "135M": 32}
GOALS = {"5M": 3.0, "135M": 1.5}
EACH_BLOCK_TO_THE_SYSTEM = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


class Turns:
    """A process's steps, each begun when the parent says so."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.facts = pipe, {}

    def begin(self) -> None:
        """Wait for this process's turn."""
        self.pipe.recv()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        self.before = resident("VmRSS")
        self.start = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """Say what the step took."""
        seconds = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
        peak = resident("VmHWM") - self.before
        self.pipe.send({"s": seconds[0], "CPU s": seconds[1], "MiB": peak, **self.facts})


def resident(name: str) -> float:
    """Resident memory of this process in MiB, now (VmRSS) or at most (VmHWM)."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(name))
    return int(line.split()[1]) / 1024


def texts(num: int) -> list[str]:
    """Prompts that the character tokenizer makes 15 tokens and a first one of."""
    return [f"{10**14 + i * 7919}" for i in range(num)]


def length_reward(prompt: str, response: str, answer: str) -> float:
    """Something that differs between responses."""
    return float(sum(map(ord, response)) % 7)


def of_rlkit(pipe: Any, name: str, folder: str, options: argparse.Namespace) -> None:
    """Steps of rlkit in one process."""
    model, turns = rk.models.load(folder), Turns(pipe)
    cluster = rk.launch(backend="local")
    tokens = RESPONSE_TOKENS[name]
    rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=tokens)
    again = rk.TorchOptions(recompute=options.recompute["rlkit"])
    backend = functools.partial(rk.TorchBackend, options=again)
    actor = cluster.spawn(rk.ActorWorker, model, lr=LR, backend=backend)
    resharder = rk.Resharder(source=actor, target=rollout)
    pairs = [(text, "") for text in texts(PROMPTS[name])]
    task = rk.tasks.from_list(pairs, verify=length_reward)
    loss_fn = lambda logprobs, batch: clipped_policy_loss(
        logprobs, batch, clip_low=0.2, clip_high=0.2
    )
    with trace.use(rk.Trace(limit=0)):  # its looks at memory let the peak begin anew
        for prompts in task.batches(size=PROMPTS[name], steps=options.steps + 1):
            turns.begin()
            batch = rollout.generate(prompts, n=SAMPLES, temperature=1.0)
            batch["rewards"] = rk.score(length_reward, batch)
            batch["old_logprobs"] = batch["rollout_logprobs"]
            batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
            start = time.perf_counter(), time.process_time()
            actor.update(batch, loss_fn=loss_fn)
            spent = time.perf_counter() - start[0], time.process_time() - start[1]
            resharder.reshard()
            turns.facts = {"train s": spent[0], "train CPU s": spent[1]}
            turns.end()
            pipe.recv()
            pipe.send(matmul_flops())


def of_trl(pipe: Any, name: str, folder: str, options: argparse.Namespace) -> None:
    """Steps of TRL."""
    import datasets
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        PrinterCallback,
        TrainerCallback,
        logging,
    )
    from trl import GRPOConfig, GRPOTrainer

    warnings.simplefilter("ignore", FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    turns = Turns(pipe)

    class InTurn(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.end()
            pipe.recv()
            pipe.send(matmul_flops())

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [length_reward("", text, "") for text in completions]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            logging_strategy="no", disable_tqdm=True, learning_rate=LR, beta=0.0,
            per_device_train_batch_size=PROMPTS[name] * SAMPLES, num_generations=SAMPLES,
            max_completion_length=RESPONSE_TOKENS[name], temperature=1.0,
            max_steps=options.steps + 1, dataloader_pin_memory=False,
            gradient_checkpointing=options.recompute["TRL"],
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=reward,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts(PROMPTS[name])}),
            callbacks=[InTurn()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def matmul_flops() -> float:
    """FLOP a CPU second of a matmul of 1024 x 1024, the best of five."""
    a, b, best = torch.randn(1024, 1024), torch.randn(1024, 1024), float("inf")
    for _ in range(5):
        start = time.process_time()
        a @ b
        best = min(best, time.process_time() - start)
    return 2 * 1024**3 / best


def train_flops(name: str) -> float:
    """Forward and backward of one step, attention's scores left out."""
    spec, rows = SPECS[name], PROMPTS[name] * SAMPLES
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters - (1 if spec.tie_embeddings else 2) * head
    responses = rows * RESPONSE_TOKENS[name]
    return 6.0 * (body * (rows * (PROMPT_TOKENS - 1) + responses) + head * responses)


SYSTEMS: dict[str, Callable[..., None]] = {"rlkit": of_rlkit, "TRL": of_trl}


def child(system: str, pipe: Any, name: str, folder: str, options: argparse.Namespace) -> None:
    """One system's process."""
    torch.set_num_threads(1)
    SYSTEMS[system](pipe, name, folder, options)


def run(
    name: str, folder: str, options: argparse.Namespace, *, environment: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """What each system's steps took, in turns; the first, which warms up, is left out."""
    spawn, found, pipes = multiprocessing.get_context("spawn"), {s: [] for s in SYSTEMS}, {}
    os.environ.update(environment)
    processes = []
    for system in SYSTEMS:
        pipes[system], theirs = spawn.Pipe()
        args = system, theirs, name, folder, options
        processes.append(spawn.Process(target=child, args=args))
        processes[-1].start()
        theirs.close()  # so that a process that dies ends the wait for it
    for variable in environment:
        del os.environ[variable]
    try:
        for step in range(options.steps + 1):
            for system, pipe in pipes.items():
                pipe.send("step")
                facts = pipe.recv()
                pipe.send("matmul")
                facts["matmul"] = pipe.recv()
                found[system] += [facts] if step else []
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, object]:
    """One row of the table."""
    sized = {}
    with tempfile.TemporaryDirectory() as folder:
        rk.models.tiny(spec=SPECS[name]).save(folder)
        options.recompute = {"rlkit": False, "TRL": not options.keep_activations}
        timed = run(name, folder, options, environment={})
        for kind, again in (("kept", False), ("recomputed", True)):
            once = argparse.Namespace(steps=1, recompute=dict.fromkeys(SYSTEMS, again))
            sized[kind] = run(name, folder, once, environment=EACH_BLOCK_TO_THE_SYSTEM)
    middle = lambda rows, key: statistics.median(row[key] for row in rows)
    tokens = PROMPTS[name] * SAMPLES * (PROMPT_TOKENS + RESPONSE_TOKENS[name])
    row: dict[str, object] = {"model": name, "tokens": tokens}
    for system, rows in timed.items():
        row[f"{system} tokens/s"] = round(tokens / middle(rows, "s"))
    for kind, title in (("s", "ratio"), ("CPU s", "CPU ratio")):
        row[title] = round(middle(timed["TRL"], kind) / middle(timed["rlkit"], kind), 2)
    row["goal"] = GOALS[name]
    for kind, found in sized.items():
        mine, theirs = (middle(found[system], "MiB") for system in SYSTEMS)
        row[f"peak MiB, {kind}"] = f"{mine:.0f} of {theirs:.0f}: {mine / theirs:.2f}"
    row["gradients MiB"] = round(4 * SPECS[name].num_parameters / 2**20)
    rate = train_flops(name) / middle(timed["rlkit"], "train CPU s")
    row["train / matmul"] = round(rate / middle(timed["rlkit"], "matmul"), 2)
    return row


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(PROMPTS), default=list(PROMPTS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep-activations", action="store_true", help="of TRL")
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("TRL: not installed; the first lines of this file say how.")
    rows = [measure(name, options) for name in options.models]
    print(f"measured, 1 thread, medians of {options.steps} steps; goal of peaks: 0.5 of TRL's")
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
