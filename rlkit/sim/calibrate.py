"""Rates of a machine from the trace of a real run on it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkit.checks import instance
from rlkit.sim.cost import forward_flops
from rlkit.sim.moves import Move, fixed
from rlkit.sim.work import Run
from rlkit.trace import check_spans, merged

DRAWS = 200  # of the longest of some responses
RIDGE = 1e-9  # where spans of two sizes cannot tell two rates apart
TRAINED = ("logprobs", "update")


def fit(trace: Any, run: Run, *, beside: Any = None) -> Run:
    """``run`` with the rates that real workers show: what a change of it will take, ``simulate``
    says then.

    trace: spans (``trace.frame()``) of a synchronous run of at least two sizes of batches, whose
    workers took turns; run: what ran, with the lengths of its responses. beside: spans of an
    asynchronous run, for predictions of such: what workers lose that share cores, its slices, and
    the driver's seconds. Without it workers are taken to have cores of their own, and no slices.

    Relative least squares of means by stage and rows, no rate below 0.
    """
    instance("run", run, Run)
    spans = _spans(trace)
    made, trained = spans[spans["stage"] == "generate"], spans[spans["stage"].isin(TRAINED)]
    for name, part in (("generate", made), ("logprobs or update", trained)):
        if part.reindex(columns=["rows", "tokens"]).isna().to_numpy().any():
            raise ValueError(
                f"fit: got {name} spans without rows or tokens, need both in each. Pass "
                "trace.frame() of a run with worker groups."
            )
        sizes = sorted(part["rows"].unique().tolist())
        if len(sizes) < 2:
            raise ValueError(
                f"fit: got {name} spans of {sizes} rows, need two sizes or more: a step's fixed "
                "seconds and those of a row look alike in one. Trace a run with small and large "
                "batches."
            )
    samples = run.workload.samples
    if (made["rows"] % samples).any():
        raise ValueError(
            f"fit: got generate spans of {sorted(made['rows'].unique().tolist())} rows, need "
            f"whole groups of run.workload.samples={samples}."
        )
    decode_s, row_s = _least_squares(_decoded(made, run), made)
    flop_s, sequence_s, step_s = _least_squares(_trained(trained, run), trained)
    if not flop_s or not decode_s + row_s:
        raise ValueError(
            "fit: got spans whose seconds do not grow with their tokens, need some that do. The "
            "machine was busy with other things, or the sizes are too close: trace a longer run."
        )
    product_s = 2.0 * run.counts.active_parameters * flop_s
    costs = replace(
        run.costs, decode_overhead_s=decode_s, decode_s_per_row=max(0.0, row_s - product_s),
        trainer_s=step_s, trainer_s_per_sequence=sequence_s, train_bytes_per_flop=0.0,
        matmul_efficiency=1.0, reward_s=0.0,
    )  # fmt: skip
    device = replace(run.node.device, flops=1.0 / flop_s, assumed=(), source="rk.sim.fit")
    found = replace(
        run,
        node=replace(run.node, device=device),
        costs=costs,
        dock=fixed(_between(spans, first="generate", busy=("generate", *TRAINED))),
        reshard=_swap(spans),
    )
    if beside is None:
        return found
    both = _spans(beside)
    slice_s, turn_s = _slices(both)
    shared = replace(costs, contention=_contention(both, found), slice_s=slice_s, turn_s=turn_s)
    return replace(
        found,
        costs=shared,
        dock=fixed(_between(both, first="staleness", busy=TRAINED)),
        reshard=_swap(both, waits_s=slice_s / 2.0),  # on average, which simulated ones do again
    )


def _spans(trace: Any) -> Any:
    frame: Any = check_spans(trace)
    return frame.assign(seconds=frame["end_s"] - frame["start_s"]).reset_index(drop=True)


def _swap(spans: Any, *, waits_s: float = 0.0) -> Move:
    """As long as the mean swap of weights, but for what it waits."""
    seconds = spans.loc[spans["stage"] == "reshard", "seconds"]
    return fixed(max(0.0, float(seconds.mean()) - waits_s) if len(seconds) else 0.0)


def _slices(spans: Any) -> tuple[float, float]:
    """Median seconds of an engine's slice, and mean seconds to the next one, in which no weights
    move; without the reading of prompts."""
    made = spans[spans["stage"].isin(["generate", "begin"])].sort_values(["worker", "start_s"])
    next_s = made.groupby("worker")["start_s"].shift(-1)
    swaps = spans.loc[spans["stage"] == "reshard", ["start_s", "end_s"]].to_numpy()
    swapped = [
        any(a < until_s and b > end_s for a, b in swaps)
        for end_s, until_s in zip(made["end_s"], next_s, strict=True)
    ]
    slices, kept = made["stage"] == "generate", ~np.array(swapped, dtype=bool) & next_s.notna()
    if not slices.any():
        return 0.0, 0.0
    idle_s = (next_s - made["end_s"])[kept].clip(lower=0.0).sum() / max(1, (slices & kept).sum())
    return float(made.loc[slices, "seconds"].median()), float(idle_s)


def _decoded(made: Any, run: Run) -> np.ndarray:
    """[spans, 2]: decode steps, which the longest response needs, and response tokens."""
    rng, samples = np.random.Generator(np.random.PCG64(0)), run.workload.samples
    longest = {
        rows: np.mean(
            [run.workload.lengths.draw(rng, rows // samples, samples).max() for _ in range(DRAWS)]
        )
        for rows in made["rows"].unique()
    }
    tokens = made["tokens"] - made["rows"] * run.workload.prompt_tokens
    return np.stack([made["rows"].map(longest), tokens], axis=1).astype(float)


def _trained(spans: Any, run: Run) -> np.ndarray:
    """[spans, 3]: operations, sequences, and 1 for an update."""
    passes = spans["stage"].map({"logprobs": 1.0, "update": 4.0 if run.recompute else 3.0})
    mean, square = run.moments
    flops = forward_flops(run.model, 1.0, square / mean) * spans["tokens"]
    parts = [passes * flops, spans["rows"], spans["stage"] == "update"]
    return np.stack(parts, axis=1).astype(float)


def _least_squares(parts: NDArray[np.float64], spans: Any) -> list[float]:
    """Rates [K], none below 0, for which ``parts`` [N, K] take what such spans take on average."""
    kinds = [spans["stage"].to_numpy(), spans["rows"].to_numpy()]
    means: NDArray[np.float64] = spans["seconds"].groupby(kinds).transform("mean").to_numpy()
    took: NDArray[np.float64] = (spans["seconds"] / means).to_numpy()
    shares = parts / means[:, None]
    kept = list(range(parts.shape[1]))
    while True:
        mine: NDArray[np.float64] = shares[:, kept]
        sizes: NDArray[np.float64] = np.sqrt((mine**2).sum(axis=0))  # else operations outweigh rows
        part = mine / sizes
        solved = np.linalg.solve(part.T @ part + RIDGE * np.eye(len(kept)), part.T @ took)
        rates = [float(rate) for rate in solved / sizes]
        if min(rates) >= 0.0:
            known = dict(zip(kept, rates, strict=True))
            return [known.get(k, 0.0) for k in range(parts.shape[1])]
        del kept[int(np.argmin(rates))]


def _between(spans: Any, *, first: str, busy: Sequence[str]) -> float:
    """Median seconds of a step, from its ``first`` stage on, in which none was ``busy``: the
    driver's, and what it scores."""
    spans = spans[spans["stage"].isin([first, *busy])].sort_values("start_s")
    step, works = (spans["stage"] == first).cumsum(), spans["stage"].isin(busy)
    idle_s = [
        each["end_s"].max() - each["start_s"].min() - each["seconds"][works].sum()
        for number, each in spans.groupby(step)
        if number and works[each.index].any()
    ]
    return max(0.0, float(np.median(idle_s))) if idle_s else 0.0


def _contention(spans: Any, run: Run) -> float:
    """How much longer the trainer took than alone, while engines ran beside it."""
    trained = spans[spans["stage"].isin(TRAINED)]
    rates = [1.0 / run.node.device.flops, run.costs.trainer_s_per_sequence, run.costs.trainer_s]
    alone_s = float((_trained(trained, run) @ rates).sum())
    made = spans.loc[spans["stage"] == "generate", ["start_s", "end_s"]].to_numpy()
    both_s = sum(
        max(0.0, min(end_s, b) - max(start_s, a))
        for start_s, end_s in trained[["start_s", "end_s"]].to_numpy()
        for a, b in merged(made)
    )
    took_s = float(trained["seconds"].sum())
    # Of took_s, both_s went 1 + contention times slower: took_s - both_s + both_s / (1 + c) = alone
    slowed_s = alone_s - (took_s - both_s)
    return max(0.0, float(both_s) / slowed_s - 1.0) if slowed_s > 0.0 else 0.0
