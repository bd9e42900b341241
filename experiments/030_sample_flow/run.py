"""Bytes and seconds of the sample flow, distributed against central. README: how to call it."""

import argparse
import math
from dataclasses import replace
from pathlib import Path

import draw
import flow
import measure
import pandas as pd
import torch

from rlkit import experiment

FOLDER = Path(__file__).resolve().parent
BUSIEST, PREDICTED = "busiest_node", "busiest_node_predicted_bytes"


def table(results: pd.DataFrame) -> str:
    """The README's table: a row a number of nodes and rows."""
    keys, seconds = ["devices", "rows"], {}
    for source in ("measured", "emulated"):
        seconds[source] = draw.medians(results, "dispatch_s", source).set_index(["system", *keys])
    counted, told = (
        draw.medians(results, name, source).set_index(["system", *keys])["value"]
        for name, source in ((f"{BUSIEST}_bytes", "measured"), (PREDICTED, "simulated"))
    )
    rows = []
    for nodes, num in sorted({key[1:] for key in counted.index}):
        row = {"nodes": nodes, "rows": num}
        for source, frame in seconds.items():
            pair = [frame["value"].get((system, nodes, num), math.nan) for system in draw.STYLES]
            row[f"dispatch, {source}, s: dock / central"] = f"{pair[0]:.2f} / {pair[1]:.2f}"
        pair = [counted[(system, nodes, num)] / 1e6 for system in draw.STYLES]
        row["busiest node, measured, MB: dock / central"] = f"{pair[0]:.0f} / {pair[1]:.0f}"
        ratios = [told[(s, nodes, num)] / max(1, counted[(s, nodes, num)]) for s in draw.STYLES]
        row["predicted / measured"] = " / ".join(f"{x:.3f}" for x in ratios)
        rows.append(row)
    return (
        experiment.markdown(pd.DataFrame(rows))
        .replace("nan / nan", "-")
        .replace("0.000 / 0.000", "-")
    )


def main() -> None:
    """Run all cluster sizes, write results, plots and README table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*")
    parser.add_argument("--rows", type=int, nargs="*")
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = experiment.read_config(FOLDER, {"flow": flow.FlowConfig})["flow"]
    config = replace(config, nodes=tuple(args.nodes or config.nodes))
    if args.rows:
        config = replace(config, rows=tuple(args.rows), most_rows=max(args.rows))
    commit = experiment.commit()
    record = experiment.RunRecord.collect(config={"flow": config}, seeds=[0])
    frames = [measure.extrapolated()]
    for num in config.nodes:
        frames.append(measure.on_cluster(num, config))
        results = pd.concat(frames).assign(commit=commit)
        print(experiment.write_results(results, args.out, record=record.finished({})))
    draw.draw(results, args.out)
    print(table(results))
    if args.out == FOLDER:
        experiment.put_table(FOLDER, table(results))


if __name__ == "__main__":
    main()
