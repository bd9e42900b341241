"""A fake NPU in host memory, for tests: torch's device `npu` on a machine that has none.

It is compiled once (`build`) and then found as torch_npu is: by the entry point that torch loads
when it is imported, in every process whose environment is `environment()`. Memory counters and the
limit are a process's own. `ASCEND_RT_VISIBLE_DEVICES` says which of the 8 devices a process sees.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from contextlib import contextmanager
from importlib import util
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / "fake_npu.cpp", HERE / "fake_hccl.cpp"]
FLAGS = ["-O1", "-g0"]
FOLDER = HERE.parent.parent / "build" / "npu_device"
ENTRY_POINT = "[torch.backends]\nfake_npu = npu_device:register\n"
METADATA = "Metadata-Version: 2.1\nName: fake-npu\nVersion: 0\n"


# ---- in the process that starts others ----


def missing() -> str:
    """What this machine lacks to build the device, or nothing."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: got none named {compiler} on PATH, install one or set CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no Python.h: install Python's development files"
    if util.find_spec("ninja") is None and shutil.which("ninja") is None:
        return "no ninja: pip install ninja"
    return ""


def library() -> Path:
    """Where the compiled device lies, by what it is made from."""
    import torch

    made_from = b"".join(p.read_bytes() for p in [*SOURCES, HERE / "fake_npu.h"])
    made_from += repr((FLAGS, torch.__version__, sys.version, sys.platform)).encode()
    return FOLDER / hashlib.sha256(made_from).hexdigest()[:16] / "fake_npu.so"


def build() -> Path:
    """Compile the device unless that is done; half a minute on two cores."""
    path = library()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:  # the system opens it if its holder is killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():  # torch loads what it compiles: into another process than this
            code = f"import npu_device; npu_device.compile_to({str(path)!r})"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the test device does not build:\n{done.stderr[:4000]}")
    return path


def compile_to(path: str) -> None:
    """Compile the device with torch's own tool."""
    from torch.utils.cpp_extension import load

    work = Path(path).parent / "work"  # a build that was killed leaves torch's lock file in it
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if util.find_spec("ninja") is not None:  # its command may be in a folder that PATH lacks
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", "")])
    files = list(map(str, SOURCES))
    load(name="fake_npu", sources=files, extra_cflags=FLAGS, build_directory=str(work))
    os.replace(work / "fake_npu.so", path)


def environment(**variables: str) -> dict[str, str]:
    """Environment of a process whose torch has the device; `build` comes first."""
    info = FOLDER / "path" / "fake_npu-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    before = os.environ.get("PYTHONPATH")
    path = [str(info.parent), str(HERE.parent), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}


# ---- in a process that has the device ----


def register() -> None:
    """Make the device known to torch; torch calls it when it is imported."""
    import torch
    import torch.distributed as dist

    spec = util.spec_from_file_location("fake_npu", library())
    assert spec is not None
    assert spec.loader is not None
    core = util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules["fake_npu"] = core
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", _module(core))
    sys.modules["torch.npu"] = torch.npu
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def collectives(options: object, _: object) -> object:
        """As torch_npu registers its own: options with a store, a rank, a size and a timeout."""
        place = options.store, options.group_rank, options.group_size, options.timeout
        return core.hccl(dist.ProcessGroupGloo(*place))

    dist.Backend.register_backend("hccl", collectives, extended_api=True, devices=["npu"])


@contextmanager
def limit(total_bytes: int):
    """Devices of so many bytes."""
    core = sys.modules["fake_npu"]
    before = core.total_bytes()
    core.set_total_bytes(total_bytes)
    try:
        yield
    finally:
        core.set_total_bytes(before)


def _module(core: types.ModuleType) -> types.ModuleType:
    """What `torch.npu` offers: the names of torch_npu that rlkit and torch itself call."""
    import torch

    npu = types.ModuleType("torch.npu", __doc__)

    def index(device: object = None) -> int:
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return core.current_device() if number is None else number

    def seed_all(seed: int) -> None:
        for i in range(core.device_count()):
            core.default_generator(i).manual_seed(seed)

    @contextmanager
    def device(which: object):
        before = core.current_device()
        core.set_device(index(which))
        try:
            yield
        finally:
            core.set_device(before)

    def memory_info(which: object = None) -> tuple[int, int]:
        return core.total_bytes() - core.allocated_bytes(index(which)), core.total_bytes()

    npu.is_available = lambda: core.device_count() > 0
    npu.device_count, npu.current_device = core.device_count, core.current_device
    npu.is_initialized, npu._is_in_bad_fork = core.is_initialized, core.is_in_bad_fork
    npu.set_device = lambda which: core.set_device(index(which))
    npu.device = device
    npu.synchronize = lambda which=None: None
    npu.memory_allocated = lambda which=None: core.allocated_bytes(index(which))
    npu.max_memory_allocated = lambda which=None: core.peak_bytes(index(which))
    npu.reset_peak_memory_stats = lambda which=None: core.reset_peak(index(which))
    npu.mem_get_info = memory_info
    npu.empty_cache = lambda: None
    npu.manual_seed_all = seed_all
    npu.manual_seed = lambda seed: core.default_generator(index()).manual_seed(seed)
    npu.get_rng_state = lambda which="npu": core.default_generator(index(which)).get_state()
    npu.set_rng_state = lambda state, which="npu": core.default_generator(index(which)).set_state(
        state
    )
    npu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    npu.Stream = lambda device="npu": torch.Stream(device=device)
    npu.stream = lambda stream: stream  # a torch.Stream is its own context manager
    npu.current_stream = torch.accelerator.current_stream
    return npu
