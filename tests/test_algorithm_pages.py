"""docs/algorithms: the code runs, and what it logs is explained there and in the glossary."""

import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from rlkit.glossary import GLOSSARY

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "algorithms"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("*.md"))
    if path.name != "README.md"
}
plt.switch_backend("Agg")


def code(text):
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def metrics_named(text):
    return set(re.findall(r"`([a-z]+/[a-z_]+)`", text))


def explained(text):
    """First column of the table of metrics."""
    return set(re.findall(r"^\| `([a-z]+/[a-z_]+)` \|", text, flags=re.MULTILINE))


def run(*blocks):
    """What the index's set-up and then the blocks leave behind."""
    names = {}
    setup, *_ = code(INDEX)
    exec(setup, names)
    for block in blocks:
        exec(block, names)
    return names


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs_and_all_it_logs_is_explained(page):
    text = PAGES[page]
    names = run(*code(text))
    logged = [value for value in names.values() if isinstance(value, Mapping)]
    logged = {name for value in logged for name in value if isinstance(name, str) and "/" in name}
    assert "policy/loss" in logged
    assert logged <= explained(text) | explained(INDEX)
    assert explained(text) <= logged
    assert names["metrics"]["actor/skipped_steps"] == 0


def test_code_of_the_index_runs():
    _, side_by_side = code(INDEX)
    frame = run(side_by_side)["frame"]
    assert frame["objective"].nunique() == 5
    plt.close("all")


@pytest.mark.parametrize("page", [*PAGES, "README"])
def test_metrics_named_are_in_the_glossary(page):
    named = metrics_named(PAGES.get(page, INDEX))
    assert named
    assert named <= GLOSSARY.keys()


def test_index_names_every_page():
    assert set(re.findall(r"\]\(([a-z_]+)\.md\)", INDEX)) == PAGES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_formula_source_code_metrics_and_failures(page):
    text = PAGES[page]
    assert re.search(r"^Source: .*arXiv \d{4}\.\d{5}", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall("^## (.*)", text, flags=re.MULTILINE) == [
        "In rlkit",
        "What is logged",
        "When it fails",
    ]
