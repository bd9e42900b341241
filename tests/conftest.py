"""What all tests share: one thread, checked shapes, one Ray cluster, and nothing left running."""

import os
import shutil
import time

# Before torch, ray or rlkit is imported, here or in a process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 starves its workers beside other tests

if "PYTEST_XDIST_WORKER" in os.environ and os.getsid(0) != os.getpid():
    os.setsid()  # `nothing_left_running` sees the processes of this worker's tests alone

import hypothesis
import psutil
import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook(["rlkit.algo", "rlkit.batch.batch"], "beartype.beartype")
torch.set_num_threads(1)
hypothesis.settings.register_profile("rlkit", deadline=None)  # machines are shared and noisy
hypothesis.settings.load_profile("rlkit")


LONG_FIRST = ("ray", "notebook", "browser", "megatron")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: what is short fills the ends of two processes evenly."""

    def place(item: pytest.Item) -> int:
        marked = (i for i, name in enumerate(LONG_FIRST) if item.get_closest_marker(name))
        return next(marked, len(LONG_FIRST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Of two processes one has all files with Ray tests, so that their clusters don't share the
    cores; the rest goes by file.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "ray" if "mark.ray" in (config.rootpath / file).read_text() else file

    return ByFile(config, log)


def _is_ours(process: psutil.Process, known: set[int], sessions: set[int]) -> bool:
    """Whether we started a process or orphaned it; `known` ones and their children are not ours.

    Process 1 takes in the orphans, so it is never in `known`; it may be of our session itself.
    """
    if process.pid == 1:
        return False
    try:
        session = os.getsid(process.pid)
        if process.status() == psutil.STATUS_ZOMBIE or session not in sessions:
            return False
        if session != os.getsid(0):  # a kernel's: all that runs there came with the kernel
            return True
        above = next((p.pid for p in process.parents() if p.pid in known), os.getpid())
    except (psutil.Error, ProcessLookupError, PermissionError):
        return False
    return above == os.getpid()


def left_running(known: set[int], sessions: set[int], *, wait_s: float = 20) -> list[str]:
    """Our processes in these sessions that are not `known` and do not end within `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        new = [p for p in psutil.process_iter(["cmdline", "name"]) if p.pid not in known]
        left = [p for p in new if _is_ours(p, known, sessions)]
        commands = [" ".join(p.info["cmdline"] or [p.info["name"]]) for p in left]
        # multiprocessing's tracker ends with this process.
        left = [c[:120] for c in commands if "multiprocessing.resource_tracker" not in c]
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


@pytest.fixture
def nothing_left_running():
    """Fail if a process that the test started outlives it, orphaned or not.

    Processes with a session of their own are watched if the test adds it to the set it gets.
    """
    known, sessions = set(psutil.pids()) - {1}, {os.getsid(0)}
    yield sessions
    left = left_running(known, sessions)
    assert not left, f"still running after the test: {left}"


@pytest.fixture(scope="session")
def ray_cluster():
    """The one Ray cluster of the test session; afterwards none of its processes is left.

    RLKIT_TEST_NODES=3 gives it that many nodes, raylets of this machine.
    """
    import rlkit as rk
    from rlkit.cluster.reaper import of_session

    num_nodes = int(os.environ.get("RLKIT_TEST_NODES", "1"))
    nodes = several_nodes(num_nodes) if num_nodes > 1 else None
    with rk.launch(address=nodes.address if nodes else None) as cluster:
        session = cluster.session
        yield cluster
    if nodes:
        nodes.shutdown()
    left = of_session(session, set())
    assert not left, f"still running after Cluster.shutdown: {left}"


def several_nodes(num):
    """A Ray cluster of ``num`` raylets on this machine, four CPUs and a store each."""
    from rlkit.cluster.connect import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 4, "object_store_memory": 200 << 20}
    nodes = Cluster(initialize_head=True, head_node_args=args | {"include_dashboard": False})
    for _ in range(num - 1):
        nodes.add_node(**args)
    return nodes


@pytest.fixture(scope="session")
def chromium_path():
    """Path of Chromium. Without one: skip, or fail where RLKIT_REQUIRE_BROWSER is set (CI)."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        absent = pytest.fail if os.environ.get("RLKIT_REQUIRE_BROWSER") else pytest.skip
        absent(f"no Chromium: got none of {', '.join(names)} on PATH, install one of them")
    return path
