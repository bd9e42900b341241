"""Which devices there are is found out without touching one."""

import fnmatch
import os
import sys

import pytest
import torch

from rlkit import device

VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that sets the device files, variables and the NPU package of this machine."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(*files: str, npu_package: bool = False, **variables: str) -> None:
        monkeypatch.setattr(device.glob, "glob", lambda pattern: fnmatch.filter(files, pattern))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if npu_package:  # found by its name; importing it would fail
            (tmp_path / "torch_npu.py").write_text("raise ImportError('no driver here')")
            monkeypatch.syspath_prepend(tmp_path)

    return make


def test_a_machine_without_device_files_has_cpus_only(machine):
    machine()
    assert device.platform("auto") is device.CPU
    assert device.num_devices("cpu") == os.cpu_count()
    assert device.num_devices("cuda") == device.num_devices("npu") == 0


def test_device_files_are_counted(machine):
    machine("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert device.num_devices("cuda") == 2
    assert device.platform("auto") is device.CUDA


def test_npus_are_counted_where_their_package_is_installed(machine):
    machine("/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager", npu_package=True)
    assert device.num_devices("npu") == 2
    assert device.platform("auto") is device.NPU


def test_npus_without_their_package_are_not_counted(machine):
    machine("/dev/davinci0", ASCEND_RT_VISIBLE_DEVICES="0")
    assert device.num_devices("npu") == 0
    assert device.platform("auto") is device.CPU


@pytest.mark.parametrize(
    ("value", "expected"), [("0", 1), ("2,3", 2), ("2, 3,", 2), ("", 0), ("-1", 0), ("GPU-ab", 1)]
)
def test_the_variable_says_how_many_this_process_may_use(value, expected, machine):
    machine("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", CUDA_VISIBLE_DEVICES=value)
    assert device.num_devices("cuda") == expected


def test_a_process_that_may_use_none_runs_on_cpus(machine):
    machine("/dev/nvidia0", CUDA_VISIBLE_DEVICES="")
    assert device.platform("auto") is device.CPU


def test_npus_come_before_gpus(machine):
    machine("/dev/davinci0", "/dev/nvidia0", npu_package=True)
    assert device.platform("auto") is device.NPU


def test_looking_imports_no_accelerator_module_and_starts_no_driver(machine):
    machine("/dev/davinci0", "/dev/nvidia0", npu_package=True)
    device.platform("auto")
    assert "torch_npu" not in sys.modules
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("kind", ["gpu", "", "CPU"])
def test_an_unknown_kind_is_an_error_that_lists_the_known_ones(kind):
    message = f"devices: got '{kind}', need one of auto, npu, cuda, cpu"
    with pytest.raises(ValueError, match=message):
        device.platform(kind)


def test_the_device_of_a_process_has_its_number_but_for_a_cpu():
    assert device.torch_device("cpu", 3) == torch.device("cpu")
    assert device.torch_device("cuda", 3) == torch.device("cuda:3")


@pytest.mark.parametrize("which", ["cpu", torch.device("cpu")])
def test_a_cpu_is_never_waited_for(which):
    assert device.synchronize(which) is None


def test_a_process_group_of_one_cpu_rank_sums_to_itself():
    store = torch.distributed.HashStore()
    group = device.process_group("cpu", store=store, rank=0, size=1, timeout_s=30)
    values = torch.arange(3.0)
    group.allreduce([values]).wait()
    assert values.tolist() == [0.0, 1.0, 2.0]
