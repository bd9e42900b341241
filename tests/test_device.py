"""Which devices there are is found out without touching one."""

import fnmatch
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from rlkit import device

VARIABLES = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that sets the device files, variables and the torch of this machine."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(*files: str, npu_package: bool = False, cuda: bool = True, **variables: str) -> None:
        monkeypatch.setattr(device.glob, "glob", lambda pattern: fnmatch.filter(files, pattern))
        monkeypatch.setattr(torch.version, "cuda", "12.8" if cuda else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
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


def test_a_cpu_build_of_torch_has_no_gpus_whatever_the_machine_has(machine):
    machine("/dev/nvidia0", cuda=False, CUDA_VISIBLE_DEVICES="0")
    assert device.num_devices("cuda") == 0
    assert device.platform("auto") is device.CPU


def test_a_backend_without_device_files_is_asked(machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch, "npu", SimpleNamespace(device_count=lambda: 3), raising=False)
    assert device.num_devices("npu") == 3
    assert device.platform("auto") is device.NPU


def test_a_variable_without_devices_makes_none(machine):
    machine(CUDA_VISIBLE_DEVICES="0,1", ASCEND_RT_VISIBLE_DEVICES="0", npu_package=True)
    assert device.num_devices("cuda") == device.num_devices("npu") == 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[("0", 1), ("1,2", 2), ("1, 2,", 2), ("", 0), ("-1", 0), ("GPU-ab", 1), ("0,-1,1", 1)],
        *[("1,3", 1), ("3,1", 0)],  # those before the first that is not there
    ],
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


def test_a_process_may_see_all_devices_unless_the_variable_is_set(machine):
    machine()
    assert device.visible("npu") is None


@pytest.mark.parametrize(
    ("value", "ids"), [("4, 2", ["4", "2"]), ("", []), ("NoDevFiles", []), ("1,-1,2", ["1"])]
)
def test_the_variable_names_what_a_process_sees(value, ids, machine):
    machine(ASCEND_RT_VISIBLE_DEVICES=value)
    assert device.visible("npu") == ids


def test_a_process_restricts_itself_by_the_variable(machine):
    machine("/dev/nvidia0", "/dev/nvidia1", CUDA_VISIBLE_DEVICES="0,1")
    device.restrict("cuda", ["1"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert device.num_devices("cuda") == 1
    device.restrict("cuda", [])
    assert device.num_devices("cuda") == 0


def test_a_cpu_has_no_variable_to_restrict(monkeypatch):
    before = dict(os.environ)
    device.restrict("cpu", ["0"])
    assert dict(os.environ) == before


def test_ray_is_asked_for_devices_by_its_own_names():
    assert device.ray_options("npu", 2) == {"resources": {"NPU": 2}}
    assert device.ray_options("cuda", 1) == {"num_gpus": 1}
    assert device.ray_options("cpu", 4) == {"num_cpus": 4}


@pytest.mark.parametrize("which", ["cpu", torch.device("cpu")])
def test_a_cpu_is_never_waited_for(which):
    assert device.synchronize(which) is None
    assert device.empty_cache(which) is None


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux counts it")
def test_memory_of_a_cpu_is_that_of_the_process():
    before, size = device.allocated_bytes("cpu"), 40 * 2**20
    kept = torch.ones(size, dtype=torch.uint8)
    during = device.allocated_bytes("cpu")
    assert during - before > size // 2
    assert during <= device.peak_bytes("cpu") < device.total_bytes("cpu")
    assert len(kept) == size


def test_on_a_cpu_nothing_moves_and_nothing_runs_beside():
    tensor = torch.arange(4.0)
    with device.side_stream("cpu"):
        host = device.offload(tensor)
    assert device.pin(tensor, "cpu") is tensor
    device.onload(tensor, host)
    assert tensor.tolist() == [0, 1, 2, 3]


def test_a_process_group_of_one_cpu_rank_sums_to_itself():
    store = torch.distributed.HashStore()
    group = device.process_group("cpu", store=store, rank=0, size=1, timeout_s=30)
    values = torch.arange(3.0)
    group.allreduce([values]).wait()
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert group.name() == "gloo"


def test_a_registered_backend_is_made_as_torch_makes_it(monkeypatch):
    """torch_npu registers hccl with torch; no other name of it is needed."""
    make = lambda place, options: (place.group_rank, place.group_size, place.timeout, options)
    monkeypatch.setitem(
        torch.distributed.Backend._plugins, "HCCL", SimpleNamespace(creator_fn=make)
    )
    monkeypatch.setattr(torch, "npu", SimpleNamespace(), raising=False)
    store, limit = torch.distributed.HashStore(), timedelta(seconds=7)
    found, name = device._collective(device.NPU, store, 1, 3, limit)
    assert (found, name) == ((1, 3, limit, None), torch.distributed.ProcessGroup.BackendType.CUSTOM)


def test_tensors_of_a_result_go_to_host_memory_and_the_rest_stays():
    tensor = torch.ones(2, requires_grad=True)
    found = device.to_host({"a": [tensor, (tensor, "text")], "b": 3})
    assert found["a"][0] is tensor
    assert found["a"][1] == (tensor, "text")
    assert found["b"] == 3
