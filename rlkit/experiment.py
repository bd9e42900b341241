"""What the scripts in ``experiments/`` share: configs, results with a source, records, tables."""

import tomllib
from pathlib import Path
from typing import Any

from rlkit.checks import did_you_mean
from rlkit.record import RunRecord, commit

__all__ = [
    "COLUMNS",
    "RECORD",
    "SOURCES",
    "RunRecord",
    "check_results",
    "commit",
    "get_table",
    "markdown",
    "put_table",
    "read_config",
    "write_results",
]

COLUMNS = (
    "run", "system", "model", "devices", "seed", "step", "metric", "value", "unit", "source",
    "commit",
)  # fmt: skip
"""Columns of every results.csv."""
SOURCES = ("measured", "emulated", "simulated", "paper")
"""Where a number may come from."""
RECORD = "record.json"
"""Name of the run record beside results.csv."""
BEGIN, END = "<!-- table: made from results.csv -->", "<!-- end of table -->"


def read_config(folder: Path, known: dict[str, type]) -> dict[str, Any]:
    """The tables of a config.toml, each as its dataclass in ``known``; unknown keys are errors."""
    from rlkit.config import from_dict

    tables = tomllib.loads((folder / "config.toml").read_text())
    unknown = sorted(set(tables) - set(known))
    if unknown:
        raise ValueError(
            f"config.toml: got unknown tables {unknown}, need some of {sorted(known)}."
            f"{did_you_mean(unknown[0], known)}"
        )
    return {name: from_dict(cls, tables.get(name, {})) for name, cls in known.items()}


def write_results(frame: Any, folder: Path, *, record: RunRecord) -> Path:
    """Check a tidy frame and write it as results.csv, and the finished run's record beside it.

    A row without unit or source is an error.
    """
    check_results(frame)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.csv"
    frame[list(COLUMNS)].to_csv(path, index=False, float_format="%.6g")
    record.write(folder / RECORD)
    return path


def check_results(frame: Any) -> None:
    """ValueError unless the frame has the columns, a unit and a known source in every row."""
    absent = [name for name in COLUMNS if name not in frame]
    if absent:
        raise ValueError(f"results: columns {absent} are missing, need {list(COLUMNS)}.")
    if frame["unit"].isna().any() or (frame["unit"] == "").any():
        bad = frame.loc[frame["unit"].isna() | (frame["unit"] == ""), "metric"].iloc[0]
        raise ValueError(
            f"results: {bad!r} has no unit, need one in every row ('1': a pure number)."
        )
    odd = sorted(set(map(str, frame["source"])) - set(SOURCES))
    if odd:
        raise ValueError(f"results: got sources {odd}, need {list(SOURCES)}.")


def markdown(frame: Any) -> str:
    """A frame as a Markdown table."""
    head = "| " + " | ".join(map(str, frame.columns)) + " |"
    rule = "|" + "---|" * len(frame.columns)
    rows = ["| " + " | ".join(map(str, row)) + " |" for row in frame.itertuples(index=False)]
    return "\n".join([head, rule, *rows])


def put_table(folder: Path, table: str) -> None:
    """Replace the README's table, between its two marker lines."""
    path = folder / "README.md"
    text = path.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{path}: need the lines {BEGIN!r} and {END!r} where the table goes.")
    path.write_text(f"{text[: text.index(BEGIN)]}{BEGIN}\n{table}\n{text[text.index(END) :]}")


def get_table(folder: Path) -> str:
    """The README's table, as it stands between its two marker lines."""
    text = (folder / "README.md").read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()
