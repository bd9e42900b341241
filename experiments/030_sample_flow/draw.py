"""The experiment's figures, from its results."""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import rlkit as rk
from rlkit.viz.style import axis_label

STYLES = {"TransferDock": "-o", "CentralDock": "--s"}
SPREAD = ":^"  # the transfer dock with prompts that lie on all nodes


def medians(results: pd.DataFrame, metric: str, source: str) -> pd.DataFrame:
    """Medians over the repeats: a row a system, rows of a batch and number of nodes."""
    chosen = results[(results["metric"] == f"dock/{metric}") & (results["source"] == source)]
    rows = chosen["run"].str.extract(r", (\d+) rows")[0].astype(int)
    keys = ["system", "rows", "devices"]
    return chosen.assign(rows=rows).groupby(keys)["value"].median().reset_index()


def draw(results: pd.DataFrame, folder: Path) -> None:
    """Three pictures."""
    rk.viz.use_style()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    for ax, source in zip(axes, ("measured", "emulated"), strict=True):
        frame = medians(results, "dispatch_s", source)
        for (system, rows), part in frame.groupby(["system", "rows"]):
            colour = f"C{sorted(frame['rows'].unique()).index(rows)}"
            label = f"{system}, {rows} rows"
            ax.plot(part["devices"], part["value"], STYLES[system], color=colour, label=label)
        ax.set_ylabel(axis_label("dispatch of a batch", "s", source))
        ax.set_ylim(bottom=0)
    axes[0].set_title("links: memory of this machine", fontsize="medium")
    axes[1].set_title("links: 1 Gbit/s a node, emulated", fontsize="medium")
    save(figure, folder / "dispatch.png")
    figure, ax = plt.subplots(figsize=(7, 3.4))
    counted, told = (
        medians(results, f"busiest_node_{name}", source)
        for name, source in (("bytes", "measured"), ("predicted_bytes", "simulated"))
    )
    most = counted["rows"].unique().min()
    for system, part in counted[counted["rows"] == most].groupby("system"):
        line = told[(told["rows"] == most) & (told["system"] == system)]
        (drawn,) = ax.plot(
            line["devices"], line["value"] / 1e6, "-", label=f"{system}, predicted (simulated)"
        )
        ax.plot(
            part["devices"], part["value"] / 1e6, "o", color=drawn.get_color(),
            label=f"{system}, counted (measured)",
        )  # fmt: skip
    ax.set_ylabel(axis_label("through the busiest node", "MB a batch"))
    save(figure, folder / "bytes.png")
    figure, ax = plt.subplots(figsize=(8, 4.6))
    frame = results[results["metric"] == "dock/link_s"]
    names = list(dict.fromkeys(run.split(": ")[1] for run in frame["run"]))
    for (run, system), part in frame.groupby(["run", "system"], sort=False):
        colour = f"C{names.index(run.split(': ')[1])}"
        part = part[part["value"] > 0]
        style = STYLES.get(system, SPREAD)
        ax.plot(part["devices"], part["value"], style, color=colour, label=run)
    ax.set_ylabel(axis_label("busiest node's link, R1's batch", "s", "simulated"))
    ax.set_yscale("log")
    save(figure, folder / "devices.png", label="devices, 8 a node")


def save(figure: plt.Figure, path: Path, *, label: str = "nodes") -> None:
    """With x axes in powers of two, and a legend below."""
    for ax in figure.axes:
        ax.set_xscale("log", base=2)
        ax.set_xlabel(axis_label(label, "1"))
        ax.xaxis.set_major_formatter("{x:.0f}")
    entries = figure.axes[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
