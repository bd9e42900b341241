"""Three ways from the training layout to generation: planned, and measured on four ranks."""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import measured
import pandas as pd
from cases import PLANNED, RANKS, Measured

import rlkit as rk
from rlkit import experiment
from rlkit.reshard.memory import by_phase

FOLDER = Path(__file__).resolve().parent
LIMIT_GIB = 64
DRAWN = ("Qwen2.5-32B", "DeepSeek-R1 671B")
FACTS = {"system": "rlkit", "seed": 0, "step": 0}


def planned() -> list[dict]:
    """Rows of the planned cases: bytes, peak and what stays needlessly."""
    rows = []
    for name, (model, train, infer, devices) in PLANNED.items():
        for strategy in measured.STRATEGIES:
            plan = rk.plan_reshard(model, train, infer, devices=devices, strategy=strategy)
            facts = FACTS | {"run": strategy.__name__, "model": name, "devices": devices}
            facts["source"] = "simulated"
            values = {("moved, all devices", "GB"): plan.nbytes / 1e9,
                      ("peak", "GiB"): plan.peak_bytes() / 2**30,
                      ("residual", "GiB"): plan.residual_bytes() / 2**30}  # fmt: skip
            rows += [facts | {"metric": m, "unit": u, "value": v} for (m, u), v in values.items()]
    return rows


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a model, number of devices and strategy."""
    keys, columns = ["model", "devices", "run", "source"], results["metric"].unique()
    wide = results.pivot(index=keys, columns="metric", values="value")
    order = pd.MultiIndex.from_frame(results[keys].drop_duplicates())
    units = dict(zip(results["metric"], results["unit"], strict=True))
    digits = lambda x: "–" if pd.isna(x) else f"{float(f'{x:.3g}'):,.10g}"
    wide = wide.loc[order, columns].map(digits)
    wide.columns = [f"{name} [{units[name]}]" for name in columns]
    return experiment.markdown(wide.reset_index().rename(columns={"run": "strategy"}))


def plot(path: Path) -> None:
    """Bars of the fullest device by phase: naive on the left, the swap on the right."""
    rk.viz.use_style()
    figure, axes = plt.subplots(len(DRAWN), 2, figsize=(9, 7), sharey="row", layout="constrained")
    for row, name in zip(axes, DRAWN, strict=True):
        model, train, infer, devices = PLANNED[name]
        for ax, strategy in zip(row, measured.STRATEGIES, strict=False):
            plan = rk.plan_reshard(model, train, infer, devices=devices, strategy=strategy)
            rk.viz.plot_memory(by_phase(plan), limit_gib=LIMIT_GIB, ax=ax, source="simulated")
            ax.set_xlabel(f"{name}, {strategy.__name__}")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Plan, measure, write results, plot and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    config = experiment.read_config(FOLDER, {"reshard": Measured})["reshard"]
    record = experiment.RunRecord.collect(config={"reshard": config}, seeds=[0])
    facts = FACTS | {"model": f"{config.mib} MiB", "devices": RANKS, "source": "measured"}
    rows = planned() + [facts | row for row in measured.rows(config)]
    results = pd.DataFrame(rows).assign(commit=experiment.commit())
    print(experiment.write_results(results, args.out, record=record.finished()))
    plot(args.out / "memory.png")
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
