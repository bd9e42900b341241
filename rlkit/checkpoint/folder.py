"""A folder of checkpoints on disk: which there are, and how one appears and goes as a whole.

A checkpoint is written into a hidden folder of its own and renamed when all of it is on the disk;
one that goes is renamed first. So whatever has a checkpoint's name is whole. Names count saves, not
only steps: a run that goes on from an earlier step never meets the names of the later ones.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.workers.shards import Receipt, read_json, write_json

FORMAT = 2
_NAME = re.compile(r"(\d{6,})_step_(\d+)")
_LEFT_OVER = re.compile(r"\.\d{6,}_step_\d+\.\w+\.(partial|gone)")


@dataclass(frozen=True, slots=True)
class Saved:
    """One checkpoint."""

    path: Path
    number: int
    """Counts the saves into this folder."""
    step: int
    """Train step after which it was made."""

    def index(self) -> dict[str, Any]:
        """What it holds; ValueError if the index was changed or is of another format."""
        path = self.path / "index.json"
        whole = read_json(path)
        content = whole.get("content") if isinstance(whole, dict) else None
        if not isinstance(content, dict) or whole.get("sha256") != _hash(content):
            raise ValueError(
                f"{path}: its sha256 does not fit its content; the file was changed or is no "
                "checkpoint's. Load an earlier checkpoint."
            )
        if content.get("format") != FORMAT:
            raise ValueError(
                f"{path}: got checkpoint format {content.get('format')!r}, need {FORMAT}; it is of "
                "another version of rlkit. Load it with that version."
            )
        return content

    def verify(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Compare every file with its size and sha256; the error names the first bad one."""
        for name, facts in files.items():
            path = self.path / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path}: not found, need every file of the checkpoint. Load an earlier one."
                )
            size = path.stat().st_size
            if size != facts["bytes"]:
                raise ValueError(
                    f"{path}: got {size} bytes, need {facts['bytes']}; the file is cut short or "
                    "was changed. Load an earlier checkpoint."
                )
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != facts["sha256"]:
                raise ValueError(
                    f"{path}: got sha256 {found[:12]}, need {facts['sha256'][:12]}; the file was "
                    "changed. Load an earlier checkpoint."
                )


def check(folder: Path) -> None:
    """NotADirectoryError if a file has the folder's name."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder}: got a file, need a folder for checkpoints. Pass another name."
        )


def saved(folder: Path) -> list[Saved]:
    """Checkpoints in the order in which they were made."""
    if not folder.is_dir():
        return []
    found = [(entry, _NAME.fullmatch(entry.name)) for entry in folder.iterdir()]
    return sorted(
        (Saved(entry, int(name[1]), int(name[2])) for entry, name in found if name),
        key=lambda one: one.number,
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from saving into the folder meanwhile; a dead process holds no lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"{folder}: another process is saving into it; need a folder for each run."
            ) from None
        yield


@contextmanager
def appearing(folder: Path, step: int) -> Iterator[Path]:
    """A hidden folder to write a checkpoint into; it gets its name when the body ends well, and
    goes if it doesn't.
    """
    number = 1 + max((one.number for one in saved(folder)), default=-1)
    name = f"{number:06d}_step_{step}"
    # A process of a killed run may still write into its own: no two share a name.
    partial = folder / f".{name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        yield partial
        for inner, _, _ in os.walk(partial):
            sync(Path(inner))
        os.rename(partial, folder / name)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder)


def write_index(partial: Path, content: Mapping[str, Any]) -> Receipt:
    """Write the index, with a hash of its own content."""
    return write_json(partial / "index.json", {"sha256": _hash(content), "content": content})


def remove(folder: Path, unwanted: Sequence[Saved]) -> None:
    """Remove checkpoints, each out of sight before its first file goes."""
    for one in unwanted:
        gone = folder / f".{one.path.name}.{uuid.uuid4().hex[:8]}.gone"
        os.rename(one.path, gone)
        shutil.rmtree(gone)


def remove_left_overs(folder: Path) -> None:
    """Remove what processes that were killed while saving or removing left."""
    for entry in folder.iterdir():
        if _LEFT_OVER.fullmatch(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def sync(folder: Path) -> None:
    """Wait until a folder's own entries are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
