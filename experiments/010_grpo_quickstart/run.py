"""GRPO on reverse_digits: seeds, each on a Ray cluster of its own. README: how to call it."""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent
KEPT = ["reward", "eval/accuracy", "time/step_s", "throughput/tokens_per_s", "wall_s"]


def run(seed: int, config: rk.recipes.GRPOConfig, sources: dict) -> pd.DataFrame:
    """One seed of task and sampling: tidy rows of the kept metrics; losses go to ``sources``."""
    task = rk.tasks.reverse_digits(length=6, seed=seed)
    model = rk.models.tiny(pretrained="reverse_digits")
    start = time.time()
    with rk.launch(devices="cpu", seed=seed) as cluster:
        log = rk.recipes.grpo(cluster, model, task, config).log
        devices = cluster.num_devices_in_use
    log.records[-1]["wall_s"] = time.time() - start
    sources |= log.sources
    facts = {"run": f"grpo_seed{seed}", "system": "rlkit", "model": "tiny-0.23M"}
    facts |= {"devices": devices, "seed": seed, "source": "measured"}
    frame = log.tidy(**facts)
    return frame[frame["metric"].isin(KEPT)]


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a seed."""
    rows = []
    for seed, each in results.groupby("seed"):
        values = {name: part["value"] for name, part in each.groupby("metric")}
        reward = values["reward"].reset_index(drop=True)
        high = reward.rolling(5).mean() >= 0.9
        accuracy = values.get("eval/accuracy", pd.Series([float("nan")])).iloc[-1]
        rows.append(
            {
                "seed": seed,
                "reward, first step": f"{reward.iloc[0]:.3f}",
                "reward, mean of last 5 steps": f"{reward.iloc[-5:].mean():.3f}",
                "step where the 5-step mean passes 0.9": high.idxmax() if high.any() else "never",
                "greedy, held out, at the end": f"{accuracy:.3f}",
                "s a step (median)": f"{values['time/step_s'].median():.2f}",
                "s in all, cluster included": f"{values['wall_s'].iloc[-1]:.0f}",
            }
        )
    return experiment.markdown(pd.DataFrame(rows))


def main() -> None:
    """Run the seeds, write results, plot and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    config = experiment.read_config(FOLDER, {"grpo": rk.recipes.GRPOConfig})["grpo"]
    config = replace(config, steps=args.steps or config.steps)
    seeds, sources = range(args.seeds), {}
    commit = experiment.commit()  # of the code that this process has imported
    record = experiment.RunRecord.collect(config={"grpo": config}, seeds=seeds)
    results = pd.concat([run(seed, config, sources) for seed in seeds]).assign(commit=commit)
    print(experiment.write_results(results, args.out, record=record.finished(sources)))
    wide = results[results["metric"] == "reward"].rename(columns={"value": "reward"})
    axes = rk.viz.plot_reward(wide[["seed", "step", "reward"]], target=0.9)
    axes.figure.savefig(args.out / "reward.png", dpi=150)
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
