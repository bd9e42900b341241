"""What the trace costs: seconds of a quickstart step with it and without, and of one span.

    python benchmarks/trace.py --repeats 4 --steps 40

One process (backend="local"), one thread. Steps with and without take turns within a run, and every
other run begins with the other kind, so that both do the same steps, on a machine that is as busy
with other work. Still, the ratio is only good to 1 or 2 %, as two medians without the trace show
(--control). So the time that spans themselves take is measured too, inside a run.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

import rlkit as rk
from rlkit import trace

KINDS = ("wall", "CPU")


def step_seconds(traces: list[trace.Trace], *, steps: int) -> list[list[tuple[float, float]]]:
    """(wall, CPU) seconds of the steps of a run, by trace, which take turns; the first is left out.

    The first step also allocates what later ones use.
    """
    seconds: list[list[tuple[float, float]]] = [[] for _ in traces]
    turns, marks = itertools.cycle(range(len(traces))), []
    task = rk.tasks.reverse_digits(length=6, seed=0)
    model = rk.models.tiny(pretrained="reverse_digits")
    config = rk.recipes.GRPOConfig(steps=steps + 1, eval_every=0)
    with ExitStack() as used, rk.launch(devices="cpu", backend="local", seed=0) as cluster:

        def on_step(log: rk.MetricLog) -> None:
            now = time.perf_counter(), time.process_time()
            if marks:
                turn, start = marks[-1]
                seconds[turn].append((now[0] - start[0], now[1] - start[1]))
            turn = next(turns)
            used.close()
            used.enter_context(trace.use(traces[turn]))
            marks.append((turn, (time.perf_counter(), time.process_time())))

        rk.recipes.grpo(cluster, model, task, config, on_step=on_step)
    return seconds


@contextmanager
def timed_spans() -> Iterator[list[float]]:
    """Seconds that spans themselves take inside the ``with``, memory included, as a list of one."""
    total, kept = [0.0], {}

    def timed(name: str) -> Callable[..., object]:
        method = kept[name] = getattr(trace.OpenSpan, name)

        def run(*args: object) -> object:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                total[0] += time.perf_counter() - start

        return run

    for name in ("__init__", "__enter__", "__exit__"):
        setattr(trace.OpenSpan, name, timed(name))
    yield total
    for name, method in kept.items():
        setattr(trace.OpenSpan, name, method)


def microseconds(body: Callable[[], object], *, num: int, repeats: int = 9) -> float:
    """CPU microseconds of one call: the median over some repeats."""
    found = []
    with trace.use(trace.Trace()):
        for _ in range(repeats):
            start = time.process_time()
            for _ in range(num):
                body()
            found.append((time.process_time() - start) / num * 1e6)
    return statistics.median(found)


def span() -> None:
    """A span without memory."""
    with trace.span("store/put", rows=256, bytes=4096):
        pass


def stage_of_actor() -> Callable[[], None]:
    """A stage call of an actor with moments and gradients, its memory looked at as after long work.

    A call of under ``trace.memory.QUICK_S`` that changes nothing would be quicker.
    """
    worker = rk.ActorWorker(rk.models.tiny(pretrained="reverse_digits"))
    worker.backend.step()
    for parameter in worker.backend.decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)

    meter, trace.memory.QUICK_S = trace.Meter(worker), 0.0

    def stage() -> None:
        with trace.stage_span("update", meter, worker="actor/0"):
            pass

    return stage


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=4, help="runs")
    parser.add_argument("--steps", type=int, default=40, help="steps a run, half of them traced")
    parser.add_argument("--control", action="store_true", help="both without the trace")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recorded, off = trace.Trace(limit=0 if args.control else 100_000), trace.Trace(limit=0)
    traced, untraced = [], []
    for repeat in range(args.repeats):
        order = [recorded, off] if repeat % 2 == 0 else [off, recorded]
        seconds = step_seconds(order, steps=args.steps)
        traced += seconds[repeat % 2]
        untraced += seconds[1 - repeat % 2]
    print(f"{len(traced)} steps with the trace, {len(untraced)} without, medians:")
    for number, kind in enumerate(KINDS):
        on, without = (statistics.median(s[number] for s in each) for each in (traced, untraced))
        print(f"{kind:4} s a step: {on:.5f} and {without:.5f}, ratio {on / without:.4f}")
    if args.control:
        return
    spans, num_spans = trace.Trace(), len(recorded.since(0)) / len(traced)
    with timed_spans() as total:
        (walls,) = step_seconds([spans], steps=args.steps)
    share = total[0] / sum(wall for wall, _ in walls)
    print(f"spans themselves: {share:.2%} of a run's time, {num_spans:.0f} spans a step")
    print(f"a span: {microseconds(span, num=5000):.2f} us")
    print(f"a stage call with its memory: {microseconds(stage_of_actor(), num=200):.2f} us")


if __name__ == "__main__":
    main()
