"""Clips around the behaviour and the proximal policy, on stale samples. README: how to call it."""

import argparse
from dataclasses import replace
from pathlib import Path

import lag
import matplotlib.pyplot as plt
import pandas as pd

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent


def wide(results: pd.DataFrame) -> pd.DataFrame:
    """A row a step, with loss, lag and thousands of samples trained so far."""
    frame = results.pivot(index=["run", "seed", "step"], columns="metric", values="value")
    frame = frame.reset_index()
    frame[["loss", "lag"]] = frame["run"].str.split(", ", expand=True)
    return frame.assign(thousands=(frame["step"] + 1) * 256 / 1000)


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a lag and loss, with each seed's number."""
    frame, rows = wide(results), []
    for key, loss in [(key, loss) for key in lag.LAGS for loss in lag.LOSSES]:
        part = frame[(frame["lag"] == key) & (frame["loss"] == loss)]
        seeds = [each.dropna(subset="eval/accuracy") for _, each in part.groupby("seed")]
        to_goal = [each["thousands"][each["eval/accuracy"] >= 0.9].min() for each in seeds]
        row = {"lag, train steps": key, "loss": loss, "steps": part["step"].max() + 1}
        row["thousands of samples to 0.9"] = ", ".join(f"{x:.1f}" for x in to_goal)
        for name, pick in (("highest", max), ("last", lambda values: values.iloc[-1])):
            found = [f"{pick(each['eval/accuracy']):.2f}" for each in seeds]
            row[f"accuracy, {name}"] = ", ".join(found)
        held, weight = part["policy/clip_fraction"], part["policy/behaviour_weight_max"]
        row |= {"tokens held by the clip": f"{held.mean():.2f}", "largest w": f"{weight.max():.3g}"}
        far, near = (part[f"proximal/{x}_error"].mean() for x in ("rollout", "interpolation"))
        row |= {"error of behaviour": f"{far:.3f}", "error of interpolated": f"{near:.3f}"}
        rows.append(row)
    return experiment.markdown(pd.DataFrame(rows)).replace("nan", "–")


def plot(results: pd.DataFrame, path: Path) -> None:
    """A panel a lag: means over seeds with bands, the two losses."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="tight")
    frame = wide(results)
    for ax, key in zip(axes.flat, lag.LAGS, strict=True):
        part = frame[frame["lag"] == key]
        runs = {loss: part[part["loss"] == loss] for loss in lag.LOSSES}
        rk.viz.plot_metric(runs, "eval/accuracy", target=0.9, ax=ax)
        ax.annotate(f"lag {key}", (0.02, 0.04), xycoords="axes fraction")
    figure.savefig(path)


def main() -> None:
    """Run them all, write results, plot and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    config = experiment.read_config(FOLDER, {"grpo": rk.recipes.GRPOConfig})["grpo"]
    config = replace(config, steps=args.steps or config.steps)
    seeds, sources, commit = range(args.seeds), {}, experiment.commit()
    record = experiment.RunRecord.collect(config={"grpo": config}, seeds=seeds)
    runs = [(loss, key, seed) for key in lag.LAGS for loss in lag.LOSSES for seed in seeds]
    results = pd.concat([lag.run(*each, config, sources) for each in runs]).assign(commit=commit)
    print(experiment.write_results(results, args.out, record=record.finished(sources)))
    plot(results, args.out / "accuracy.png")
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
