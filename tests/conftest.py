"""What all tests share: one thread, checked shapes, one Ray cluster, and nothing left running."""

import ctypes
import os
import shutil
import sys
import time

# Before torch, ray or rlkit is imported, here or in a process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import hypothesis
import psutil
import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook(["rlkit.algo", "rlkit.batch"], "beartype.beartype")
torch.set_num_threads(1)
hypothesis.settings.register_profile("rlkit", deadline=None)  # machines are shared and noisy
hypothesis.settings.load_profile("rlkit")
if (
    sys.platform == "linux"
):  # PR_SET_CHILD_SUBREAPER: orphans come to us, so left_running() sees them
    ctypes.CDLL(None).prctl(36, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray tests last: rk.launch ends the cluster before it, and a local one would end theirs."""
    items.sort(key=lambda item: item.get_closest_marker("ray") is not None)


def left_running(known: set[int], *, wait_s: float = 20) -> list[str]:
    """Command lines of our child processes that are not `known` and do not end in `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        left = []
        for child in psutil.Process().children():
            try:
                command = " ".join(" ".join(child.cmdline()).split())[:120]
                if child.pid not in known and child.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{child.pid} {command or child.name()}")
            except psutil.NoSuchProcess:
                continue
        # Python's own: it ends with this process.
        left = [line for line in left if "multiprocessing.resource_tracker" not in line]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


def child_pids() -> set[int]:
    """Process ids of our child processes now."""
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture
def nothing_left_running():
    """Fail if a process that the test started, or one of its orphans, outlives the test."""
    known = child_pids()
    yield
    left = left_running(known)
    assert not left, f"still running after the test: {left}"


@pytest.fixture(scope="session")
def ray_cluster():
    """The one Ray cluster of the test session; afterwards none of its processes is left."""
    import rlkit as rk

    known = child_pids()
    with rk.launch() as cluster:
        yield cluster
    left = left_running(known)
    assert not left, f"still running after Cluster.shutdown: {left}"


@pytest.fixture(scope="session")
def chromium_path():
    """Path of Chromium. Without one: skip, or fail where RLKIT_REQUIRE_BROWSER is set (CI)."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        absent = pytest.fail if os.environ.get("RLKIT_REQUIRE_BROWSER") else pytest.skip
        absent(f"no Chromium: got none of {', '.join(names)} on PATH, install one of them")
    return path
