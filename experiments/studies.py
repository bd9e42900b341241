"""What 070, 071 and 072 share: the common fit, the scores, the table of a README.

python experiments/studies.py fit      # fills [parameters] of fit.toml
python experiments/studies.py score    # prints the scores of the held-out cells
python experiments/studies.py without  # each study scored by a fit without it
python experiments/studies.py ablate   # seconds of three runs without each effect
"""

import argparse
import importlib.util
import sys
import tomllib
from dataclasses import asdict, fields, replace
from pathlib import Path

import pandas as pd

from rlkit import experiment
from rlkit.sim.study import BOUNDS, Build, Parameters, Row, fit, null, played, predict, summary

ROOT = Path(__file__).resolve().parent
FIT = ROOT / "fit.toml"
STUDIES = ("070_mindspeed_rl", "071_areal", "072_verl_async")
NULL = "null model"


def read_fit() -> dict:
    return tomllib.loads(FIT.read_text())


def cells(folder: Path) -> list[Row]:
    return pd.read_csv(folder / "paper.csv", keep_default_na=False).to_dict("records")


def build_of(study: str) -> Build:
    spec = importlib.util.spec_from_file_location(f"run_{study}", ROOT / study / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build


def use_of(cell: str, study: str, plan: dict) -> str:
    """What a cell is for: fit, held out, apart, same or excluded."""
    for use in ("same", "excluded"):
        if cell in plan[use]:
            return use
    if cell in plan["fit"][study]:
        return "fit"
    return "apart" if cell in plan["apart"]["cells"] else "held out"


def predicted(study: str, parameters: Parameters, plan: dict) -> pd.DataFrame:
    """A row a cell: published, simulated, null model, what it is for."""
    build, rows = build_of(study), cells(ROOT / study)
    known = [(r, build(r, parameters)) for r in rows if r["cell"] in plan["fit"][study]]
    found = []
    for row in rows:
        use = use_of(row["cell"], study, plan)
        value = predict(row, build, parameters)
        facts = {name: row.get(name, "") for name in ("cell", "block", "metric", "unit", "model")}
        facts |= {"system": row.get("system") or row.get("machine"), "devices": row["devices"]}
        other = null(row, build(row, parameters), known)
        found.append(facts | {"use": use, "paper": row["value"], "value": value, "null": other})
    return pd.DataFrame(found).assign(study=study)


def score(folder: Path, build: Build, table) -> None:
    """Write results.csv and record.json of one study into --out; into its own folder the table."""
    parser = argparse.ArgumentParser(description=score.__doc__)
    parser.add_argument("--out", type=Path, default=folder, help="by default the study's folder")
    out = parser.parse_args().out
    plan, commit = read_fit(), experiment.commit()
    parameters = Parameters(**plan["parameters"])
    config = {"parameters": parameters, "structure": plan["structure"]}
    record = experiment.RunRecord.collect(config=config, seeds=[0])
    frame = predicted(folder.name, parameters, plan).rename(columns={"cell": "run"})
    frame = frame.assign(seed=0, step=0, commit=commit)
    parts = [
        frame.assign(value=frame["paper"], source="paper"),
        frame.assign(source="simulated"),
        frame.assign(value=frame["null"], source="simulated", system=NULL),
    ]
    results = pd.concat(parts).dropna(subset="value")
    print(experiment.write_results(results, out, record=record.finished({})))
    lines = table(pd.read_csv(out / "results.csv"))
    print(lines)
    if out == folder:
        experiment.put_table(folder, lines)


def table(results: pd.DataFrame) -> str:
    """Paper, simulated, ratio and the null model's ratio, a row a cell."""
    plan, rows = read_fit(), []
    study = next(s for s in STUDIES if set(results["run"]) <= {r["cell"] for r in cells(ROOT / s)})
    for cell, each in results.groupby("run", sort=False):
        paper = each[each["source"] == "paper"].iloc[0]
        ours = each[(each["source"] == "simulated") & (each["system"] != NULL)]["value"]
        nulls = each[each["system"] == NULL]["value"]
        value = ours.iloc[0] if len(ours) else None
        rows.append(
            {
                "cell": cell,
                "unit": paper["unit"],
                "paper": f"{paper['value']:,.5g}",
                "simulated": "out of memory" if value is None else f"{value:,.5g}",
                "ratio": "" if value is None else f"{value / paper['value']:.2f}",
                "null model's": f"{nulls.iloc[0] / paper['value']:.2f}" if len(nulls) else "",
                "use": use_of(cell, study, plan),
            }
        )
    return experiment.markdown(pd.DataFrame(rows))


def run_fit(
    names: tuple[str, ...] = tuple(BOUNDS),
    *,
    without: str = "",
    rounds: int = 4,
) -> Parameters:
    """The fit over the cells of fit.toml, ``without`` one study, from the parameters there."""
    plan, chosen = read_fit(), []
    start = Parameters(**plan["parameters"])
    for study in STUDIES:
        build = build_of(study)
        wanted = () if study == without else plan["fit"][study]
        chosen += [(row, build) for row in cells(ROOT / study) if row["cell"] in wanted]
    say = lambda line: print(line, flush=True)
    return fit(chosen, start, names=names, rounds=rounds, report=say)


def write_parameters(parameters: Parameters) -> None:
    text = FIT.read_text()
    text = text[: text.index("\n[parameters]\n")] + "\n[parameters]\n"
    lines = [f"{item.name} = {getattr(parameters, item.name):.6g}" for item in fields(parameters)]
    FIT.write_text(text + "\n".join(lines) + "\n")


def scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Summaries of the simulator and of the null model, by use and by block."""
    rows = []
    for name, part in [
        *frame.groupby("use", sort=False),
        *frame[frame["use"] == "held out"].groupby("study"),
        *frame[frame["use"] == "held out"].groupby("block"),
    ]:
        rows.append({"part": name, "model": "simulator", **summary(part)})
        part = part.dropna(subset="null").assign(value=lambda each: each["null"])
        rows.append({"part": name, "model": "null", **summary(part)})
    return pd.DataFrame(rows).round(3)


def without() -> pd.DataFrame:
    """Held-out scores of each study by a fit that saw none of its cells.

    Parameters that only this study tells of keep the common fit's values.
    """
    plan, frames = read_fit(), []
    own = {"071_areal": ("code_tokens", "areal_scale"), "072_verl_async": ("dapo_tokens",)}
    for study, fixed in own.items():
        names = tuple(name for name in BOUNDS if name not in fixed)
        found = run_fit(names, without=study, rounds=3)
        print(study, found)
        frames.append(predicted(study, found, plan))
    return scores(pd.concat(frames))


def ablate() -> pd.DataFrame:
    """AReaL's 1.5B runs with one effect off at a time, nothing fitted again."""
    plan = read_fit()
    p, build = Parameters(**plan["parameters"]), build_of("071_areal")
    rows = {row["cell"]: row for row in cells(ROOT / "071_areal")}
    changes = {
        "full": (p, lambda run: run),
        "no length tail": (replace(p, sigma=0.05), lambda run: run),
        "no overhead of a decode step": (replace(p, decode_overhead_s=1e-9), lambda run: run),
        "no reads of the cache": (p, lambda run: replace(run, cache_bytes=1e-3)),
        "no trainer's cost a sequence": (replace(p, trainer_s_per_sequence=0.0), lambda run: run),
        "no time to load weights": (p, lambda run: replace(run, reshard=None)),
    }
    found = []
    for name, (parameters, change) in changes.items():
        seconds = {}
        for label, cell in (("sync", "t1_1.5B_sync"), ("1", "f5c_1"), ("4", "t1_1.5B_areal")):
            made = build(rows[cell], parameters)
            seconds[label] = played(change(made.run), made.schedule, 0).step_s
        ratio = seconds["sync"] / seconds["4"]
        found.append({"effect": name, **seconds, "sync / staleness 4": ratio})
    return pd.DataFrame(found).round(2)


if __name__ == "__main__":
    if sys.argv[1:] == ["without"]:
        print(without().to_string())
    elif sys.argv[1:] == ["ablate"]:
        print(experiment.markdown(ablate()))
    elif sys.argv[1:] == ["fit"]:
        found = run_fit()
        print(asdict(found))
        write_parameters(found)
    else:
        plan = read_fit()
        parameters = Parameters(**plan["parameters"])
        frame = pd.concat([predicted(study, parameters, plan) for study in STUDIES])
        print(scores(frame).to_string())
