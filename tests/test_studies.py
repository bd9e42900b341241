"""The common fit of 070, 071 and 072: every cell has one use, none by a typing error."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent / "experiments"
spec = importlib.util.spec_from_file_location("studies", ROOT / "studies.py")
studies = importlib.util.module_from_spec(spec)
spec.loader.exec_module(studies)
PLAN = studies.read_fit()
CELLS = {study: studies.cells(ROOT / study) for study in studies.STUDIES}
NAMES = {row["cell"] for rows in CELLS.values() for row in rows}


def test_every_cell_named_in_the_fit_exists():
    fitted = {cell for cells in PLAN["fit"].values() for cell in cells}
    assert fitted | PLAN["same"].keys() | PLAN["excluded"].keys() <= NAMES
    assert set(PLAN["apart"]["cells"]) <= NAMES


def test_no_cell_is_both_fitted_and_left_out():
    fitted = [cell for cells in PLAN["fit"].values() for cell in cells]
    uses = [*fitted, *PLAN["same"], *PLAN["excluded"], *PLAN["apart"]["cells"]]
    assert len(uses) == len(set(uses))


def test_every_excluded_cell_has_a_reason():
    assert all(isinstance(why, str) and why for why in PLAN["excluded"].values())


def test_at_most_eight_parameters_are_fitted_on_fewer_cells_than_are_held_out():
    assert len(PLAN["parameters"]) <= 8
    uses = [studies.use_of(row["cell"], study, PLAN) for study in CELLS for row in CELLS[study]]
    assert uses.count("fit") < uses.count("held out") / 5


@pytest.mark.parametrize("study", studies.STUDIES)
def test_every_published_number_has_a_unit_and_a_place(study):
    frame = pd.read_csv(ROOT / study / "paper.csv")
    assert frame[["cell", "metric", "value", "unit", "where"]].notna().all().all()
    assert frame["cell"].is_unique
    assert (frame["value"] > 0).all()


@pytest.mark.parametrize("study", studies.STUDIES)
def test_results_are_those_of_the_committed_parameters(study):
    """The first cell of each study, simulated again."""
    results = pd.read_csv(ROOT / study / "results.csv")
    row = CELLS[study][0]
    parameters = studies.Parameters(**PLAN["parameters"])
    value = studies.predict(row, studies.build_of(study), parameters)
    ours = results[(results["run"] == row["cell"]) & (results["source"] == "simulated")]
    assert value == pytest.approx(ours[ours["system"] != studies.NULL]["value"].item(), rel=1e-4)
