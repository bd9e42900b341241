"""Make every notebook and its py:percent twin hold the same cells; strip outputs.

Where the two differ the file changed last wins, as with `jupytext --sync`. A second run changes
nothing: cell ids are nbstripout's ordinals and the metadata is fixed.
"""

from pathlib import Path

import jupytext
import nbformat
from nbstripout import strip_output

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
NO_VERSION = "-jupytext.text_representation.jupytext_version"  # else each release is a difference
METADATA = {
    "jupytext": {
        "cell_metadata_filter": "tags,-all",
        "formats": "ipynb,py:percent",
        "notebook_metadata_filter": f"kernelspec,jupytext,{NO_VERSION}",
    },
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stems(folder: Path) -> list[Path]:
    """Paths without suffix of all NN_*.ipynb and NN_*.py, solutions included."""
    found = [p for p in folder.rglob("[0-9][0-9]_*.*") if p.suffix in {".ipynb", ".py"}]
    return sorted({p.with_suffix("") for p in found if ".ipynb_checkpoints" not in p.parts})


def newest(stem: Path) -> Path:
    """The file of a pair whose cells count: the only one, or the one changed last."""
    pair = [p for p in (stem.with_suffix(".py"), stem.with_suffix(".ipynb")) if p.exists()]
    return max(pair, key=lambda p: p.stat().st_mtime_ns)


def render(source: Path) -> tuple[str, str]:
    """Text of the .py and of the .ipynb made from the cells of `source`."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    percent = jupytext.writes(notebook, fmt="py:percent")
    # The .ipynb is made from the .py, so what a text file cannot hold is in neither.
    paired = jupytext.reads(percent, fmt="py:percent")
    for cell in paired.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    paired.metadata = nbformat.from_dict(METADATA)
    paired.nbformat, paired.nbformat_minor = 4, 5
    _, paired = nbformat.validator.normalize(paired)
    strip_output(paired, keep_output=False, keep_count=False, keep_id=False)
    return percent, nbformat.writes(paired, version=nbformat.NO_CONVERT).rstrip("\n") + "\n"


def sync(stem: Path) -> list[Path]:
    """Bring one pair into line; returns the files that were written."""
    percent, ipynb = render(newest(stem))
    written = []
    for path, text in ((stem.with_suffix(".py"), percent), (stem.with_suffix(".ipynb"), ipynb)):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def main(folder: Path = NOTEBOOKS) -> None:
    """Sync all pairs, and say which files were written."""
    for stem in stems(folder):
        for path in sync(stem):
            print(f"wrote {path.relative_to(folder.parent)}")


if __name__ == "__main__":
    main()
