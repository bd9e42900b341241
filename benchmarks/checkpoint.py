"""What a checkpoint costs: seconds and bytes of save and load, beside a plain write of as many.

    python benchmarks/checkpoint.py --folder /tmp --repeats 5

One process (backend="local"), one thread. Plain is one file of as many bytes, written and fsynced
just before each save, so that a busy disk is so for both; hash is sha256 over as many bytes.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import pandas as pd
import torch

import rlkit as rk
from rlkit.algo import clipped_policy_loss, group_relative


def make_spec(width: int, layers: int) -> rk.ModelSpec:
    """A decoder of about ``12 * layers * width**2`` parameters."""
    return rk.ModelSpec(
        vocab_size=23,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_layers=layers,
        num_heads=width // 32,
        num_kv_heads=width // 32,
        head_dim=32,
        max_positions=128,
    )


def loss_fn(logprobs, batch):
    """GRPO's loss."""
    return clipped_policy_loss(logprobs, batch, clip_low=0.2, clip_high=0.2)


def seconds(call) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def plain_write(folder: Path, data: bytes) -> float:
    """Seconds to write and fsync one file."""
    path = folder / "plain"

    def write() -> None:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    took = seconds(write)
    path.unlink()
    return took


def measure(name: str, spec: rk.ModelSpec, folder: Path, *, repeats: int) -> dict:
    """One row: after a train step, a batch of 256 rows is in flight."""
    task, model = rk.tasks.reverse_digits(length=6), rk.models.tiny(spec=spec)
    with rk.launch(devices="cpu", backend="local") as cluster:
        rollout = cluster.spawn(rk.RolloutWorker, model, max_new_tokens=8)
        actor = cluster.spawn(rk.ActorWorker, model, lr=1e-4)
        prompts, log = task.stream(size=32), rk.MetricLog()
        batch = rollout.generate(next(prompts), n=8)
        batch["rewards"] = rk.score(task.verify, batch)
        batch["old_logprobs"] = actor.compute_logprobs(batch)
        batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))
        log.add(0, actor.update(batch, loss_fn=loss_fn))
        checkpoint = rk.Checkpointer(folder / "run")
        parts = {"workers": {"actor": actor}, "prompts": prompts, "log": log}
        size = checkpoint.save(0, **parts, batches={"next": batch}).bytes
        data = os.urandom(size)
        plain, save, load = [], [], []
        for step in range(1, repeats + 1):
            plain.append(plain_write(folder, data))
            save.append(checkpoint.save(step, **parts, batches={"next": batch}).seconds)
            load.append(seconds(lambda: checkpoint.load(**parts)))
    return {
        "model": name,
        "parameters": spec.num_parameters,
        "MiB": round(size / 2**20, 2),
        "save s": round(statistics.median(save), 4),
        "load s": round(statistics.median(load), 4),
        "plain s": round(statistics.median(plain), 4),
        "hash s": round(seconds(lambda: hashlib.sha256(data).digest()), 4),
        "save / plain": round(statistics.median(save) / statistics.median(plain), 2),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"tiny": (96, 2), "small": (256, 8), "medium": (768, 8)}
    rows = []
    for name, (width, layers) in sizes.items():
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            rows.append(measure(name, make_spec(width, layers), folder, repeats=options.repeats))
        finally:
            shutil.rmtree(folder)
    print("measured, median of", options.repeats)
    print(pd.DataFrame(rows).to_string(index=False))


if __name__ == "__main__":
    main()
