"""Files of a checkpoint: safetensors shards and JSON, on the disk before anyone names them.

Every write returns the file's bytes and sha256; nothing that is read is unpickled.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARD_BYTES = 1 << 30  # writing a shard takes two copies of it in host memory

Receipt = dict[str, dict[str, Any]]
"""File name -> ``bytes`` and ``sha256``."""


def write_file(path: Path, data: bytes) -> Receipt:
    """Write a new file and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}


def write_json(path: Path, value: Any) -> Receipt:
    """Write plain values as JSON; floats come back to the bit."""
    return write_file(path, json.dumps(value).encode())


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> Receipt:
    """Write ``stem.0.safetensors``, ``stem.1.safetensors``, ... of at most 1 GiB each, a larger
    tensor alone.
    """
    from safetensors.torch import save

    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    receipt: Receipt = {}
    for number, shard in enumerate(shards):
        # safetensors refuses tensors that share memory, as two names of one column do.
        copies = {name: torch.clone(t.detach().cpu()).contiguous() for name, t in shard.items()}
        receipt |= write_file(folder / f"{stem}.{number}.safetensors", save(copies))
    return receipt


def read_json(path: Path) -> Any:
    """Values of a JSON file; errors name the file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: not found, need this file of the checkpoint.") from None
    except ValueError as error:
        raise ValueError(
            f"{path}: not JSON ({error}); the file is cut short or was changed. Load an earlier "
            "checkpoint."
        ) from error


def read_tensors(
    folder: Path, files: Iterable[str], *, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The wanted tensors of some shards, in host memory; errors name the file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for name in files:
        path = folder / name
        if not path.exists():
            raise FileNotFoundError(f"{path}: not found, need this shard of the checkpoint.")
        try:
            with safe_open(path, framework="pt") as shard:
                found |= {key: shard.get_tensor(key) for key in shard.keys() if wanted(key)}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path}: can't be read ({error}); the file is cut short or not safetensors. Load "
                "an earlier checkpoint."
            ) from error
    return found


def check_equal_facts(
    found: Mapping[str, Tensor], own: Mapping[str, Tensor], *, source: Path
) -> None:
    """ValueError unless both hold the same names, shapes and types; names the first odd one."""
    for name in sorted(found.keys() | own.keys()):
        theirs, mine = (
            f"{tuple(t.shape)} {str(t.dtype)[6:]}" if t is not None else "absent"
            for t in (found.get(name), own.get(name))
        )
        if theirs != mine:
            raise ValueError(
                f"{source}: got {name} {theirs}, need {mine}: this checkpoint is of another model. "
                "Spawn the worker with the model it was made with, or use another folder."
            )
