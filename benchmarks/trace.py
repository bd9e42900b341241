"""What the trace costs: seconds of a quickstart step with it and without, and of one span.

    python benchmarks/trace.py --repeats 5 --steps 12

The same seeds, one process (backend="local"), one thread; runs with and without take turns, so that
a machine that is busy with something else now and then is so for both. CPU seconds of the process
are what it computed, whoever else was computing.
"""

import argparse
import statistics
import time
from itertools import pairwise

import torch

import rlkit as rk
from rlkit import trace


def step_seconds(recorded: trace.Trace, *, steps: int) -> tuple[list[float], list[float]]:
    """Wall and CPU seconds of the steps of a run whose spans go to ``recorded``, but the first."""
    cpu_s: list[float] = []
    task = rk.tasks.reverse_digits(length=6, seed=0)
    model = rk.models.tiny(pretrained="reverse_digits")
    config = rk.recipes.GRPOConfig(steps=steps + 1, eval_every=0)
    with trace.use(recorded), rk.launch(devices="cpu", backend="local", seed=0) as cluster:
        log = rk.recipes.grpo(
            cluster, model, task, config, on_step=lambda log: cpu_s.append(time.process_time())
        )
    return log.frame()["time/step_s"].tolist()[1:], [b - a for a, b in pairwise(cpu_s)]


def span_us(num: int = 20_000) -> float:
    """Microseconds of one span without memory."""
    with trace.use(trace.Trace()):
        start = time.perf_counter()
        for _ in range(num):
            with trace.span("store/put", rows=256, bytes=4096):
                pass
        return (time.perf_counter() - start) / num * 1e6


def stage_us(num: int = 500) -> float:
    """Microseconds of one stage call of a trained actor, its memory sampled at both ends."""
    worker = rk.ActorWorker(rk.models.tiny(pretrained="reverse_digits"))
    for parameter in worker.backend.decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    worker.backend.step()
    with trace.use(trace.Trace()):
        start = time.perf_counter()
        for _ in range(num):
            with trace.stage_span("update", worker, worker="actor/0"):
                pass
        return (time.perf_counter() - start) / num * 1e6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ("wall", "CPU")
    seconds = {(name, kind): [] for name in ("on", "off") for kind in kinds}
    recorded = trace.Trace()
    for _ in range(args.repeats):
        recorded = trace.Trace()
        for name, each in (("on", recorded), ("off", trace.Trace(limit=0))):
            for kind, found in zip(kinds, step_seconds(each, steps=args.steps), strict=True):
                seconds[name, kind] += found
    medians = {key: statistics.median(each) for key, each in seconds.items()}
    spans, stages = statistics.median(span_us() for _ in range(5)), stage_us()
    frame = recorded.frame()
    sampled = frame.filter(like="after/allocated").notna().to_numpy().any(axis=1).sum()
    per_step, sampled = len(frame) / (args.steps + 1), sampled / (args.steps + 1)
    computed_s = ((per_step - sampled) * spans + sampled * stages) / 1e6
    print(f"medians of {len(seconds['on', 'CPU'])} steps each")
    for kind in kinds:
        on, off = medians["on", kind], medians["off", kind]
        print(
            f"{kind:4} s a step: {on:.5f} with the trace, {off:.5f} without, ratio {on / off:.4f}"
        )
    print(f"a span: {spans:.2f} us, {per_step:.0f} a step")
    print(f"a stage call with memory: {stages:.2f} us, {sampled:.0f} of them")
    print(f"spans x their cost: {computed_s / medians['off', 'wall']:.2%} of a step")


if __name__ == "__main__":
    main()
