"""Runs that a fit to other runs' traces must predict. README: what is compared and how."""

import argparse
from dataclasses import replace
from pathlib import Path

import laptop
import numpy as np
import pandas as pd

import rlkit as rk
from rlkit import experiment

FOLDER = Path(__file__).resolve().parent
RATE, STEP = "throughput/tokens_per_s", "time/step_s"


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a run; measured rates are all tokens over all seconds."""
    rows = []
    seen = {case.name for case in laptop.CALIBRATION}
    for name in (case.name for case in laptop.CALIBRATION + laptop.PREDICTED):
        each = results[results["run"] == name]
        measured = each[each["source"] == "measured"].pivot(
            index="seed", columns="metric", values="value"
        )
        tokens = measured[RATE] * measured[STEP]
        rate = tokens.sum() / measured[STEP].sum()
        ours = each[(each["source"] == "simulated") & (each["metric"] == RATE)]["value"].item()
        rows.append(
            {
                "run": name,
                "use": "fit" if name in seen else "predicted",
                "measured, tokens/s": f"{rate:.0f}",
                "lowest to highest": f"{measured[RATE].min():.0f} to {measured[RATE].max():.0f}",
                "simulated, tokens/s": f"{ours:.0f}",
                "ratio": f"{ours / rate:.2f}",
                "load of the machine": f"{measured['load/1min_mean'].mean():.0f}",
            }
        )
    return experiment.markdown(pd.DataFrame(rows))


def main() -> None:
    """Measure all runs interleaved, fit, predict; write results and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    setting = experiment.read_config(FOLDER, {"laptop": laptop.Laptop})["laptop"]
    setting = replace(setting, repeats=args.repeats or setting.repeats)
    cases, commit = laptop.CALIBRATION + laptop.PREDICTED, experiment.commit()
    seeds = range(setting.repeats)
    record = experiment.RunRecord.collect(config={"laptop": setting}, seeds=seeds)
    frames, spans = [], {case: [] for case in cases}
    for repeat in seeds:
        for i in np.random.default_rng(repeat).permutation(len(cases)):
            found, tidy = laptop.measure(cases[i], steps=setting.steps, repeat=repeat)
            spans[cases[i]].append(found)
            frames.append(tidy)
            print(repeat, cases[i].name, tidy["value"].round(2).to_list(), flush=True)
    small, large, both = (pd.concat(spans[case]) for case in laptop.CALIBRATION)
    known = laptop.described(laptop.CALIBRATION[0])
    turns = rk.sim.fit(pd.concat([small, large]), known)
    beside = rk.sim.fit(pd.concat([small, large]), known, beside=both)
    for case in cases:
        fitted = turns if case.max_staleness is None else beside
        found = laptop.simulate(case, fitted, steps=setting.steps)
        frames.append(laptop.tidy(case, found, seed=0, source="simulated"))
    print(beside.costs)
    results = pd.concat(frames).assign(commit=commit)
    print(experiment.write_results(results, args.out, record=record.finished({})))
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
