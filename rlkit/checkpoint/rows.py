"""Batches in flight: their rows written and read where they lie, their metadata by the driver."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlkit.batch import Batch
from rlkit.batch.columns import META
from rlkit.batch.rows import Rows, concat
from rlkit.batch.store import Column
from rlkit.cluster.futures import Ended, Future
from rlkit.types import RowStore
from rlkit.workers import shards


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Writes every column of some rows into a folder: tensors as safetensors, text as JSON.

    A store may call it on some of the rows at a time; each call writes files of its own.
    """

    folder: str

    def __call__(self, batch: Batch) -> Rows:
        """A receipt in the first row."""
        return Rows([json.dumps(self.write(batch)), *[""] * (len(batch) - 1)])

    def write(self, batch: Batch) -> dict[str, Any]:
        """Files written, and the shards and the JSON file among them."""
        folder, stem = Path(self.folder), f"rows_{batch.uids[0] if len(batch) else 0}"
        tensors = {"uid": torch.from_numpy(batch.uids.copy())}  # what came by wire is read-only
        objects: dict[str, list[Any]] = {}
        for name, column in batch.columns.items():
            rows = column.load(batch.uids)
            if isinstance(rows.values, list):
                check_plain(f"column {name!r}", rows.values)
                objects[name] = rows.values
                continue
            tensors[f"values/{name}"] = rows.values
            if rows.lengths is not None:
                tensors[f"lengths/{name}"] = rows.lengths
        found = shards.write_tensors(folder, stem, tensors)
        text = shards.write_json(folder / f"{stem}.json", objects)
        return {"files": found | text, "tensors": list(found), "objects": f"{stem}.json"}


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Reads one column of some rows back, in the process that keeps them from then on."""

    folder: str
    name: str
    pieces: tuple[Mapping[str, Any], ...]
    """What each call of ``WriteRows`` wrote."""

    def __call__(self, batch: Batch) -> Rows:
        """The column's values of the batch's uids, in their order."""
        read = [self._read(piece) for piece in self.pieces]
        uids = np.concatenate([uids for uids, _ in read])
        order = np.argsort(uids, kind="stable")
        at = order[np.searchsorted(uids, batch.uids, sorter=order)]
        rows = concat([rows for _, rows in read], name=self.name)
        return rows.select(torch.from_numpy(at))

    def _read(self, piece: Mapping[str, Any]) -> tuple[np.ndarray, Rows]:
        folder, values, lengths = Path(self.folder), f"values/{self.name}", f"lengths/{self.name}"
        names = ("uid", values, lengths)
        found = shards.read_tensors(folder, piece["tensors"], wanted=lambda key: key in names)
        if values not in found:
            objects = shards.read_json(folder / piece["objects"])
            return found["uid"].numpy(), Rows(objects[self.name])
        return found["uid"].numpy(), Rows(found[values], found.get(lengths))


def write_batch(folder: Path, batch: Batch) -> tuple[dict[str, Any], shards.Receipt]:
    """Write a batch into a folder: what ``read_batch`` needs to know, and the files."""
    write = WriteRows(str(folder))
    if len(batch):
        receipts = batch.store.apply(write, batch, "checkpoint_rows").load().unpack()
        pieces = [json.loads(text) for text in receipts if text]
    else:
        pieces = [write.write(batch)]  # a store has nowhere to run it
    meta = {name: torch.from_numpy(batch.meta[name].copy()) for name in META}
    files = shards.write_tensors(folder, "meta", meta)
    facts = {
        "meta": list(files),
        "columns": {name: column.expands for name, column in batch.columns.items()},
        "pieces": [{key: p[key] for key in ("tensors", "objects")} for p in pieces],
        "step_tokens": batch.step_tokens,
        "step_rows": batch.step_rows,
    }
    for piece in pieces:
        files |= piece["files"]
    return facts, files


def read_batch(folder: Path, facts: Mapping[str, Any], *, store: RowStore) -> Batch:
    """The batch that ``write_batch`` wrote, with its rows in ``store``."""
    meta = shards.read_tensors(folder, facts["meta"])
    uids, group_ids, versions = (meta[name].numpy().copy() for name in META)
    batch = Batch(uids, store=store, group_ids=group_ids, policy_version=versions)
    columns = {}
    for name, expands in facts["columns"].items():
        read = ReadRows(str(folder), name, tuple(facts["pieces"]))
        if len(batch):
            parts = store.apply(read, batch, name).parts
        else:
            parts = [store.put(name, uids, read(batch))]
        columns[name] = Column(name, store, uids, parts, expands=expands)
    batch.columns.update(columns)
    batch.step_tokens, batch.step_rows = facts["step_tokens"], facts["step_rows"]
    return batch


def write_batches(
    folder: Path, batches: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, shards.Receipt]]:
    """Write named batches, or futures of such, each into a folder of its name."""
    facts: dict[str, Any] = {}
    files: dict[str, shards.Receipt] = {}
    draws: dict[int, int] = {}  # batches cut from one share their count of samples
    for name, given in batches.items():
        batch = given.result() if isinstance(given, Future) else given
        if not isinstance(batch, Batch):
            raise TypeError(
                f"batches[{name!r}]: got {type(batch).__name__}, need a Batch, or a future of one."
            )
        (folder / name).mkdir(parents=True)
        try:
            facts[name], files[f"batches/{name}"] = write_batch(folder / name, batch)
        except Exception as error:
            error.add_note(f"while saving the rows of batches[{name!r}]")
            raise
        facts[name]["future"] = isinstance(given, Future)
        facts[name]["same_draws_as"] = draws.setdefault(id(batch.draws), len(draws))
        facts[name]["draws"] = [[group, num] for group, num in batch.draws.items()]
    return facts, files


def read_batches(folder: Path, facts: Mapping[str, Any], *, store: RowStore) -> dict[str, Any]:
    """Named batches as they were saved; what was a future is one that is done."""
    draws: dict[int, dict[int, int]] = {}
    found: dict[str, Any] = {}
    for name, each in facts.items():
        batch = read_batch(folder / name, each, store=store)
        batch.draws = draws.setdefault(each["same_draws_as"], dict(each["draws"]))
        found[name] = Ended(batch, name) if each["future"] else batch
    return found


def check_plain(name: str, value: Any) -> None:
    """TypeError unless a value is made of what JSON brings back as it was."""
    if value is None or type(value) in (bool, int, float, str):
        return
    inside: Any = value if type(value) is list else None
    if type(value) is dict and all(type(key) is str for key in value):
        inside = value.values()
    if inside is None:
        raise TypeError(
            f"{name}: got {type(value).__name__} {value!r:.60}, which a checkpoint can't hold; "
            "need None, bool, int, float, str, and lists and dicts with text keys of such."
        )
    for item in inside:
        check_plain(name, item)
