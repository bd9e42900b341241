"""GRPO of a real checkpoint on one-digit sums; a seed's rows are on the disk after every step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

import rlkit as rk
from rlkit import algo

KEPT = ["reward", "eval/accuracy", "eval/mean_at_8", "response/length_mean_tokens"]
KEPT += ["group/signal_fraction", "policy/kl_ref", "actor/grad_norm"]
KEPT += ["mismatch/logprob_mean", "mismatch/logprob_max", "mismatch/kl", *algo.RATIO_BINS]
KEPT += [f"time/{part}_s" for part in ("step", "generate", "update", "evaluate", "checkpoint")]
DIGITS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(model: rk.models.Pretrained, *, seed: int) -> rk.tasks.Task:
    """174 training and 26 held-out sums and differences of two digits; right is what has the answer
    as its last number.
    """
    task = rk.tasks.from_reasoning_gym(
        "chain_sum", size=2000, seed=seed, tokenizer=model.tokenizer, **DIGITS
    )
    task.verify = algo.number_match  # the dataset's own has partial marks: 0.5 for 17 in place of 7
    return task


def train(
    model: rk.models.Pretrained,
    seed: int,
    config: rk.recipes.GRPOConfig,
    put: Callable[[pd.DataFrame, dict], None],
    *,
    folder: Path,
) -> None:
    """One seed, from its newest checkpoint in ``folder`` on; ``put(rows, sources)`` after every
    step, with what held before the first as step -1.
    """
    task = sums(model, seed=seed)
    held_out = task.held_out(config.eval_prompts)
    before = folder / "before.json"
    facts = {"run": f"{config.engine.__name__}, seed {seed}", "system": "rlkit", "devices": 1}
    facts |= {"model": "SmolLM2-135M-Instruct", "seed": seed, "source": "measured"}

    def on_step(log: rk.MetricLog, after: dict[str, float] | None = None) -> None:
        whole = rk.MetricLog()
        whole.records = [{"step": -1} | json.loads(before.read_text()), *log.records]
        whole.records[-1] = whole.records[-1] | (after or {})
        frame = whole.tidy(**facts)
        put(frame[frame["metric"].isin(KEPT)], log.sources)

    if not before.exists():
        with rk.launch(backend="local", seed=seed) as cluster:
            longest = {"max_new_tokens": config.max_new_tokens}
            found = judged(cluster.spawn(rk.RolloutWorker, model, **longest), held_out, task)
        folder.mkdir(parents=True, exist_ok=True)
        before.write_text(json.dumps(found))
    with rk.launch(backend="local", seed=seed) as cluster:
        checkpoint = rk.Checkpointer(folder / "steps", keep_last=1)
        run = rk.recipes.grpo(cluster, model, task, config, on_step=on_step, checkpoint=checkpoint)
        on_step(run.log, judged(run.rollout, held_out, task))


def judged(rollout: Any, held_out: rk.Batch, task: rk.tasks.Task) -> dict[str, float]:
    """Greedy accuracy, and the mean over 8 responses a prompt sampled at temperature 1."""
    greedy = rk.evaluate(rollout, held_out, task.verify)["eval/accuracy"]
    sampled = rk.evaluate(rollout, held_out, task.verify, n=8, temperature=1.0)["eval/accuracy"]
    return {"eval/accuracy": greedy, "eval/mean_at_8": sampled}
