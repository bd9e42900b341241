"""GRPO of SmolLM2-135M-Instruct on one-digit sums, a seed a call. README: how to call it."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import real

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent
ENGINES = {"torch": rk.TorchEngine, "vllm": rk.VLLMEngine}


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a run."""
    rows = []
    for run, each in results.groupby("run"):
        of = {name: part.set_index("step")["value"] for name, part in each.groupby("metric")}
        reward, tokens, seconds = of["reward"], of["response/length_mean_tokens"], of["time/step_s"]
        row = {"run": run, "steps": len(reward)}
        for name, key in (("greedy", "eval/accuracy"), ("sampled", "eval/mean_at_8")):
            row[f"held out, {name}"] = ", ".join(f"{value:.2f}" for value in of[key])
        row["reward"] = f"{reward[:5].mean():.2f}, {reward[-5:].mean():.2f}"
        row["tokens a response"] = f"{tokens[:5].mean():.0f}, {tokens[-5:].mean():.0f}"
        row["s a step (median)"] = f"{seconds.median():.0f}"
        row["minutes, at that"] = f"{seconds.median() * len(seconds) / 60:.0f}"
        apart = of["mismatch/logprob_mean"].mean(), of["mismatch/logprob_max"].max()
        row["engine and trainer apart"] = f"{apart[0]:.0e}, {apart[1]:.0e}"
        rows.append(row)
    return experiment.markdown(pd.DataFrame(rows))


def collect(runs: Path, out: Path) -> None:
    """What the runs left in their folder as one results.csv with record, plot and table."""
    results = pd.concat([pd.read_csv(path) for path in sorted(runs.glob("rows_*.csv"))])
    records = [json.loads(path.read_text()) for path in sorted(runs.glob("record_*.json"))]
    facts = {"started": min(each["started"] for each in records)}
    facts["ended"] = max(each["ended"] for each in records)
    facts["seeds"] = sorted({int(seed) for seed in results["seed"]})
    record = replace(experiment.RunRecord(**records[0]), **facts)
    experiment.write_results(results, out, record=record)
    of_torch = results[results["run"].str.startswith("TorchEngine")]
    wide = of_torch.pivot(index=["seed", "step"], columns="metric", values="value").reset_index()
    rk.viz.plot_reward(wide).figure.savefig(out / "reward.png", dpi=150)
    print(table(results))
    if out == FOLDER:
        experiment.put_table(FOLDER, table(results))


def main() -> None:
    """Train a seed, or without a model collect what there is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder by scripts/convert_gguf.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, default="torch")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, default=Path("build/050_real_model"))
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    if args.model is None:
        return collect(args.runs, args.out)
    name, commit = f"{args.engine}_seed{args.seed}", experiment.commit()
    config = experiment.read_config(FOLDER, {"grpo": rk.recipes.GRPOConfig})["grpo"]
    config = replace(config, steps=args.steps or config.steps, engine=ENGINES[args.engine])
    record = experiment.RunRecord.collect(config={"grpo": config}, seeds=[args.seed])

    def put(rows: pd.DataFrame, sources: dict) -> None:
        rows.assign(commit=commit).to_csv(args.runs / f"rows_{name}.csv", index=False)
        record.finished(sources).write(args.runs / f"record_{name}.json")

    args.runs.mkdir(parents=True, exist_ok=True)
    real.train(rk.models.load(args.model), args.seed, config, put, folder=args.runs / name)


if __name__ == "__main__":
    main()
