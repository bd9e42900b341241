"""Asynchronous against synchronous training, on Ray. README: how to call it."""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
import parts

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent
NAMES = ("synchronous", "asynchronous", "asynchronous, no interrupts")


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a run; means over seeds."""
    rows = []
    for _, kind in results.groupby("source", sort=False):
        values = kind.pivot_table(index="run", columns="metric", values="value", sort=False)
        base = values["throughput/tokens_per_s"].iloc[0]
        for run, each in values.iterrows():
            facts = kind[kind["run"] == run].iloc[0]
            speed = each["throughput/tokens_per_s"]
            shares = each.filter(like="staleness/share_of_").dropna()
            shares.index = shares.index.str.rsplit("_", n=1).str[-1].astype(int)
            histogram = ", ".join(
                f"{age}: {share:.2f}" for age, share in shares.sort_index().items()
            )
            idle = each.filter(regex="^idle/.*/").dropna().items()
            rows.append(
                {
                    "run": run,
                    "source": facts["source"],
                    "devices": facts["devices"],
                    "tokens/s": f"{speed:.0f}",
                    "ratio": f"{speed / base:.2f}",
                    "idle, mean of devices": f"{each['idle/device_mean']:.2f}",
                    "idle, by worker": ", ".join(f"{n[5:]} {x:.2f}" for n, x in idle),
                    "interruptions": f"{each['interruptions/num']:.0f}",
                    "share of tokens by staleness": histogram,
                    "load of the machine": f"{each['load/1min_mean']:.0f}",
                }
            )
    return experiment.markdown(pd.DataFrame(rows))


def main() -> None:
    """Run them all, write results and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--simulated", action="store_true", help="leave out what needs Ray")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    known = {"measured": parts.Setting, "simulated": parts.Setting}
    config = experiment.read_config(FOLDER, known)
    config = {key: replace(each, steps=args.steps or each.steps) for key, each in config.items()}
    if args.simulated:
        del config["measured"]
    seeds, sources, commit = range(args.seeds), {}, experiment.commit()
    record = experiment.RunRecord.collect(config=config, seeds=seeds)
    frames = []
    for each, seed in [(each, seed) for each in config.values() for seed in seeds]:
        backend = "local" if each.simulated else "ray"
        with rk.launch(backend=backend, devices="cpu", seed=seed) as cluster:
            frames += [parts.run(name, seed, each, cluster, sources) for name in NAMES]
    results = pd.concat(frames).assign(commit=commit)
    print(experiment.write_results(results, args.out, record=record.finished(sources)))
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
