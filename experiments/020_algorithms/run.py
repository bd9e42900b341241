"""Nine algorithms on reverse_digits, three seeds each, in one process. README: how to call it."""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import nine
import pandas as pd

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent


def wide(results: pd.DataFrame) -> pd.DataFrame:
    """A row a step: thousands of samples drawn so far, and the accuracy's mean over five steps."""
    order = results.assign(run=pd.Categorical(results["run"], results["run"].unique()))
    frame = order.pivot(index=["run", "seed", "step"], columns="metric", values="value")
    runs = frame.groupby(["run", "seed"], observed=True)
    frame["thousands"] = runs["sampling/num_responses"].cumsum() / 1000
    frame["smooth"] = runs["sampling/accuracy"].transform(lambda x: x.rolling(5).mean())
    return frame.reset_index()


def table(results: pd.DataFrame) -> str:
    """The README's table: a row an algorithm, with each seed's number."""
    rows = []
    for name, frame in wide(results).groupby("run", observed=True):
        runs = [each for _, each in frame.groupby("seed")]
        samples = [each["thousands"][each["smooth"] >= 0.9].min() for each in runs]
        last = [each["eval/accuracy"].dropna().iloc[-1] for each in runs]
        row = {"algorithm": name, "steps": ", ".join(str(len(each)) for each in runs)}
        row["thousands of samples to 0.9"] = ", ".join(f"{x:.1f}" for x in samples)
        row["greedy, held out, last time"] = ", ".join(f"{x:.2f}" for x in last)
        row["s a step (median)"] = f"{frame['time/step_s'].median():.2f}"
        rows.append(row)
    return experiment.markdown(pd.DataFrame(rows)).replace("nan", "never")


def plot(results: pd.DataFrame, path: Path) -> None:
    """A panel an algorithm: mean of the seeds, and a band from the lowest to the highest."""
    rk.viz.use_style()
    figure, axes = plt.subplots(3, 3, figsize=(9, 7), sharex=True, sharey=True, layout="tight")
    by_run = wide(results).groupby("run", observed=True)
    for ax, (name, frame) in zip(axes.flat, by_run, strict=True):
        thousands = frame.groupby("step")["thousands"].mean()
        accuracy = frame.groupby("step")["sampling/accuracy"]
        ax.fill_between(thousands, accuracy.min(), accuracy.max(), alpha=0.3, linewidth=0)
        ax.plot(thousands, accuracy.mean(), label=f"{name}, {frame['seed'].nunique()} seeds")
        ax.axhline(0.9, color="grey", linestyle="--", linewidth=1)
        ax.legend(loc="lower right", frameon=False)
    figure.supxlabel("samples drawn [thousands]")
    figure.supylabel("accuracy at temperature 1 [1], measured; dashed: 0.9")
    figure.savefig(path)


def main() -> None:
    """Run them all, write results, plot and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    configs = experiment.read_config(FOLDER, nine.CONFIGS)
    configs = {key: replace(each, steps=args.steps or each.steps) for key, each in configs.items()}
    seeds, sources, commit = range(args.seeds), {}, experiment.commit()
    record = experiment.RunRecord.collect(config=configs, seeds=seeds)
    frames = [nine.run(name, seed, configs, sources) for name in nine.NAMES for seed in seeds]
    results = pd.concat(frames).assign(commit=commit)
    print(experiment.write_results(results, args.out, record=record.finished(sources)))
    plot(results, args.out / "accuracy.png")
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
