"""The record of a run: what it takes to run it again, and to tell two runs apart.

It holds no absolute path, host name or user name: records are committed beside their results.
"""

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rlkit.functions import Source, source_of

# Two names or more after the root: a lone "/" divides. Backslashes need a drive, or they escape.
_PATH = re.compile(
    r"(?<![\w.:/~-])~?/(?:[^\s'\"`,;:/\\()]+/)+([^\s'\"`,;:/\\()]*)"
    r"|\b[A-Za-z]:[/\\](?:[^\s'\"`,;:/\\]+[/\\]+)*([^\s'\"`,;:/\\]*)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a run was; plain values, so that it is JSON and a row of a table alike."""

    config: Mapping[str, Any]
    """Configuration: dataclasses as dicts, functions as name and hash."""
    seeds: Sequence[int]
    """Seeds, one a repetition."""
    losses: Sequence[Mapping[str, str]] = ()
    """Functions that made the metrics: name, hash as in ``actor/loss_hash``, source text."""
    commit: str
    """Git commit of the checkout; ``unknown`` outside one."""
    dirty: bool
    """Whether the package's files differ from that commit."""
    command: Sequence[str] = field(default_factory=tuple)
    """Script and arguments; files by name, or by path inside the checkout."""
    started: str
    """When it began, UTC, ISO 8601."""
    ended: str = ""
    """When it ended; empty while it runs."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that matter."""
    python: str = field(default_factory=platform.python_version)
    """Python's version."""
    platform: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    """Operating system and kind of processor."""
    cpu: str = ""
    """Model of the processor."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """How many devices of each kind there are."""

    @classmethod
    def collect(cls, *, config: Any, seeds: int | Iterable[int]) -> "RunRecord":
        """The record of a run that begins now.

        ``config`` is a dataclass, or a dict of plain values, dataclasses and functions.
        """
        settings = plain(config, "config")
        if not isinstance(settings, dict):
            raise TypeError(
                f"config: got {type(config).__name__}, need a dataclass or a dict of settings. "
                "Pass {'grpo': config} to name it."
            )
        numbers = [seeds] if isinstance(seeds, int) else [int(seed) for seed in seeds]
        return cls(
            config=settings,
            seeds=numbers,
            commit=_git("rev-parse", "HEAD") or "unknown",
            dirty=bool(_git("status", "--porcelain", "--", "rlkit")),
            command=[_clean(part) for part in sys.argv],
            started=_now(),
            packages=_versions(),
            cpu=_cpu_model(),
            devices=_devices(),
        )

    def finished(self, sources: Mapping[str, Source] | None = None) -> "RunRecord":
        """The record of the run that ends now; ``log.sources`` are the losses it trained with."""
        found = [
            {"name": each.name, "hash": each.hash, "source": _clean(each.text)}
            for each in (sources or {}).values()
        ]
        return replace(self, losses=found, ended=_now())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, keys in the order of the fields."""
        return asdict(self)

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, in one piece: a reader never sees half of it."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        part.replace(path)
        return path


def commit() -> str:
    """Short hash of the checkout, with a + when it has changes; ``unknown`` outside one."""
    changed = _git("status", "--porcelain", "--", "rlkit")
    return (_git("rev-parse", "--short", "HEAD") + ("+" if changed else "")) or "unknown"


def plain(value: Any, name: str = "value") -> Any:
    """A value as JSON has it; TypeError names the setting that can't be written down."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return _clean(str(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"{name}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, type):
        return value.__qualname__
    if callable(value):
        source = source_of(value)
        return {"function": source.name, "hash": source.hash}
    raise TypeError(
        f"{name}: got {type(value).__name__}, need numbers, text, lists, dicts, dataclasses or "
        "functions. Put what matters of it into the record by name."
    )


def _clean(text: str) -> str:
    """Text without absolute paths: relative inside the checkout, else the last name alone."""
    for folder in (_root(), Path.cwd()):
        text = text.replace(f"{folder}{os.sep}", "")
    if "\n" not in text and Path(text).is_absolute():
        return Path(text).name or "path"
    return _PATH.sub(lambda found: found[1] or found[2] or "path", text)


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def _git(*args: str) -> str:
    """What git says of the checkout that this file is tracked in; nothing outside one."""

    def run(*args: str) -> str:
        try:
            done = subprocess.run(
                ["git", *args], cwd=_root(), capture_output=True, text=True, timeout=30
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # A wheel's folder may lie inside some other project's checkout.
    return run(*args) if run("ls-files", "--", "rlkit/__init__.py") else ""


def _versions() -> dict[str, str]:
    """Versions of rlkit and of what it asks for, extras included, as far as it is installed."""
    try:
        asked = metadata.requires("rlkit") or []
    except metadata.PackageNotFoundError:  # a folder on the path
        asked = ["torch", "ray", "numpy", "pandas"]
    names = [re.split(r"[^\w.-]", line)[0] for line in asked if "extra == 'dev'" not in line]
    found = {}
    for name in dict.fromkeys(["rlkit", *names]):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown"


def _devices() -> dict[str, int]:
    from rlkit import device

    counts = {kind: device.num_devices(kind) for kind in device.PLATFORMS}
    return {kind: count for kind, count in counts.items() if count}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
