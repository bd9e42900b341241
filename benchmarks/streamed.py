"""Seconds a step of the streamed schedule against the synchronous one, with long-tailed lengths.

    python benchmarks/streamed.py --steps 6 --picture build/streamed.png

One Ray cluster, measured, of a tiny model with random weights. A prompt's responses are as long as
a lognormal draw for it says, so the last group ends long after most. The reference, a process of
its own, and a reward that waits, as for a verifier elsewhere, prepare the groups side by side in
both schedules. Steps of the two take turns, on prompts of the same lengths.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlkit as rk
from rlkit import trace
from rlkit.algo import clipped_policy_loss, group_relative

MEDIAN_TOKENS, SIGMA, LEAST = 64, 1.0, 4  # lognormal: 1 of 100 prompts is 10 times the median
PREPARE = ("score", "ref_logprobs")


class LongTailed(rk.TorchEngine):
    """Ends a prompt's responses after a lognormal number of tokens; no token stops them."""

    def add(self, request: Any) -> None:
        """Queue a prompt."""
        super().add(self._cut(request))

    def generate(self, requests: Any, **options: Any) -> Any:
        """All responses."""
        return super().generate([self._cut(request) for request in requests], **options)

    def _cut(self, request: Any) -> Any:
        draw = np.random.default_rng(request.uids[0] >> 16).normal()  # of the group
        length = int(np.clip(MEDIAN_TOKENS * np.exp(SIGMA * draw), LEAST, None))
        limit = min(length, request.sampling.max_new_tokens)
        sampling = replace(request.sampling, max_new_tokens=limit, stop_token_ids=())
        return replace(request, sampling=sampling)


def reward(prompt: str, response: str, answer: str, *, seconds: float) -> float:
    """Exact match, by a verifier that waits for something else so long."""
    time.sleep(seconds)
    return float(response == answer)


class Loop:
    """GRPO in the parts of a schedule."""

    def __init__(self, cluster: Any, args: argparse.Namespace) -> None:
        spec = replace(rk.models.tiny().spec, max_positions=args.most_tokens + 32)
        model = rk.models.tiny(spec=spec)
        self.args, self.task = args, rk.tasks.reverse_digits(length=6)
        self.rollout = cluster.spawn(
            rk.RolloutWorker, model, engine=LongTailed, max_new_tokens=args.most_tokens
        )
        self.actor = cluster.spawn(rk.ActorWorker, model, lr=1e-5)
        self.reference = cluster.spawn(rk.ReferenceWorker, model)
        self.resharder = rk.Resharder(source=self.actor, target=self.rollout)
        self.prompts = next(self.task.stream(size=args.size))
        self.train_began = 0.0

    def stream(self, prompts: Any) -> Iterator[Any]:
        """Chunks of finished groups."""
        return self.rollout.stream(prompts, n=self.args.n, least=self.args.least)

    def prepare(self, batch: Any) -> None:
        """Rewards, logprobs of the reference, advantages."""
        batch["ref_logprobs"] = self.reference.compute_logprobs(batch)
        batch["rewards"] = rk.score(partial(reward, seconds=self.args.reward_s), batch)
        batch["advantages"] = batch.expand(group_relative(batch["rewards"], batch["group_ids"]))

    def train(self, batch: Any) -> dict[str, float]:
        """One update."""
        self.train_began = time.perf_counter()
        batch["old_logprobs"] = self.actor.compute_logprobs(batch)
        loss = partial(clipped_policy_loss, clip_low=0.2, clip_high=0.2)
        return self.actor.update(batch, loss_fn=loss)

    def schedules(self) -> dict[str, Iterator[Any]]:
        """Both schedules over the same prompts again and again, so over the same lengths."""
        asked = itertools.repeat(self.prompts)
        rest = (self.prepare, self.train, self.resharder.reshard)
        whole = partial(self.rollout.generate, n=self.args.n)
        return {
            "synchronous": rk.schedule.synchronous(asked, whole, *rest),
            "streamed": rk.schedule.streamed(asked, self.stream, *rest),
        }


def overlap(frame: Any) -> tuple[float, float]:
    """(seconds of the stages of prepare, seconds of these while a generation ran), by the trace."""
    spans = {
        name: trace.merged(part[["start_s", "end_s"]])
        for name, part in frame.assign(
            kind=frame["stage"].map(lambda stage: "prepare" if stage in PREPARE else stage)
        ).groupby("kind")
    }
    prepared, generated = (spans.get(name, np.zeros((0, 2))) for name in ("prepare", "generate"))
    inside = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in prepared for b in generated)
    return float((prepared[:, 1] - prepared[:, 0]).sum()), float(inside)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="of each schedule, after one of each")
    parser.add_argument("--size", type=int, default=32, help="prompts a step")
    parser.add_argument("--n", type=int, default=8, help="responses a prompt")
    parser.add_argument("--least", type=int, default=4, help="groups of a chunk at least")
    parser.add_argument("--most-tokens", type=int, default=800)
    parser.add_argument("--reward-s", type=float, default=0.005, help="of each response")
    parser.add_argument("--picture", type=Path, default=Path("build/streamed.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    seconds: dict[str, list[tuple[float, float]]] = {"synchronous": [], "streamed": []}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in seconds}
    frames: dict[str, Any] = {}
    with rk.launch(devices="cpu", seed=0) as cluster:
        loop = Loop(cluster, args)
        running = loop.schedules()
        for step in range(args.steps + 1):
            for name in sorted(running, reverse=step % 2 == 1):
                with trace.use(trace.Trace()) as kept:
                    start = time.perf_counter()
                    record = next(running[name])
                    spent = time.perf_counter() - start, loop.train_began - start
                frames[name] = kept.frame()
                if step:  # the first loads code
                    seconds[name].append(spent)
                    times[name].append(overlap(frames[name]))
        lengths = record["batch"].lengths("response_ids")
    report(seconds, times, lengths)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    rk.viz.plot_timeline(frames).figure.savefig(args.picture, dpi=150)
    print(f"timeline of the last step of each: {args.picture}")


def report(seconds: Any, times: Any, lengths: np.ndarray) -> None:
    """Print the numbers; medians over steps."""
    short, long = np.median(lengths), lengths.max()
    print(
        f"{len(lengths)} responses, lognormal by prompt: median {short:.0f}, longest {long} tokens"
    )
    for name in seconds:
        step, ready = (statistics.median(each[i] for each in seconds[name]) for i in (0, 1))
        prepared, inside = (statistics.median(t[i] for t in times[name]) for i in (0, 1))
        share = inside / prepared if prepared else 0.0
        print(
            f"{name:12} {step:.2f} s a step, {ready:.2f} s of it until training; prepare "
            f"{prepared:.2f} s, {inside:.2f} s of it ({share:.0%}) while a generation ran"
        )
    for i, what in enumerate(("a step", "until training")):
        pairs = [[each[i] for each in seconds[name]] for name in ("synchronous", "streamed")]
        saved = statistics.median(a - b for a, b in zip(*pairs, strict=True))
        ratio = statistics.median(pairs[0]) / statistics.median(pairs[1])
        print(f"{what}: saved {saved:.2f} s, {ratio:.2f} times as fast (measured)")


if __name__ == "__main__":
    main()
