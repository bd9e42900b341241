"""environment.yml and pyproject.toml ask for the same packages, and the wheel holds the weights."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rattler import MatchSpec

ROOT = Path(__file__).resolve().parent.parent
CONDA_ONLY = {"python", "pip"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def extras(*names: str) -> list[str]:
    return [line for name in names for line in project()["optional-dependencies"][name]]


def pins(requirements: list[str]) -> dict[str, SpecifierSet]:
    """Canonical name -> version range of pip requirement lines."""
    parsed = [Requirement(line) for line in requirements]
    return {canonicalize_name(each.name): each.specifier for each in parsed}


def conda_pins(lines: list[str]) -> dict[str, SpecifierSet]:
    """Canonical name -> version range of conda lines, each parsed as a MatchSpec."""
    specs = {line: MatchSpec(line) for line in lines}
    return {
        canonicalize_name(spec.name.normalized): SpecifierSet(
            re.sub(r"^=?(?=\d)", "==", str(spec.version))
        )
        for spec in specs.values()
    }


def environment() -> tuple[list[str], list[str], list[str]]:
    """Conda lines, pip requirement lines and pip option lines of environment.yml."""
    loaded = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [line for line in loaded["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in loaded["dependencies"] if isinstance(line, dict)]
    options = [line for line in pip if line.startswith("-")]
    return conda, [line for line in pip if line not in options], options


def test_environment_yml_asks_for_what_pyproject_asks_for():
    conda, pip, _ = environment()
    asked = conda_pins(conda) | pins(pip)
    assert not conda_pins(conda).keys() & pins(pip).keys(), "listed for conda and for pip"
    wanted = pins(project()["dependencies"] + extras("notebooks", "dev"))
    assert {name: spec for name, spec in asked.items() if name not in CONDA_ONLY} == wanted


def test_environment_yml_has_a_python_that_pyproject_allows():
    (line,) = [line for line in environment()[0] if line.startswith("python=")]
    assert SpecifierSet(project()["requires-python"]).contains(line.removeprefix("python="))


def test_environment_yml_installs_this_folder_under_the_constraints():
    assert environment()[2] == ["-c constraints.txt", "-e ."]


def test_a_broken_conda_line_is_refused():
    with pytest.raises(Exception, match=r"(?i)version"):
        conda_pins(["python=="])


def test_constraints_pin_one_torch_release_in_range():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    (pin,) = pins(lines)["torch"]
    assert pin.operator == "=="
    assert pins(project()["dependencies"])["torch"].contains(pin.version)


def test_no_default_package_needs_an_accelerator():
    default = pins(project()["dependencies"] + extras("notebooks", "dev"))
    assert not default.keys() & {"torch-npu", "vllm", "vllm-ascend", "megatron-core", "triton"}


def test_npu_extra_is_one_matching_set():
    npu = {name: str(spec) for name, spec in pins(extras("npu")).items()}
    assert npu["torch"].removeprefix("==") in npu["torch-npu"]
    assert npu["vllm"].removeprefix("==") in npu["vllm-ascend"]


def test_wheel_holds_the_package_and_its_weights_only(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("rlkit-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    weights = ROOT / "rlkit" / "models" / "weights"
    stored = {p.relative_to(ROOT).as_posix() for p in weights.rglob("*") if p.is_file()}
    assert any(name.endswith(".safetensors") for name in stored)
    assert stored <= names
    assert {name.split("/")[0] for name in names} == {"rlkit", "rlkit-0.1.0.dist-info"}
    assert wheel.stat().st_size < 1_500_000


def test_makefile_help_lists_every_target():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = re.findall(r"^([a-z0-9-]+):.*## ", text, re.MULTILINE)
    assert sorted(phony.split()) == sorted(listed)
