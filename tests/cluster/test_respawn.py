"""A group that is started again while other threads call it."""

import threading
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray


class Slow:
    """Takes ``start_s`` to start, and cannot start at all while ``broken`` is a file."""

    def __init__(self, context, start_s, broken):
        if Path(broken).exists():
            raise ValueError("broken by design")
        time.sleep(start_s)

    def sleep(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
        return "awake"


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    return tmp_path_factory.mktemp("slow") / "broken"


@pytest.fixture(scope="module")
def group(ray_cluster, broken):
    return ray_cluster.spawn(Slow, start_s=1.0, broken=str(broken))


def test_who_waits_for_a_call_hears_at_once_that_its_processes_were_ended(ray_cluster, group):
    future = group.submit.sleep(600.0)
    errors = []

    def wait():
        try:
            future.result()
        except RuntimeError as error:
            errors.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    ray_cluster.respawn(group)
    waiter.join(timeout=60.0)
    assert not waiter.is_alive()
    assert "sleep: its processes were ended" in errors[0]
    assert group.sleep(0.0) == "awake"


def test_a_call_while_the_group_starts_again_is_refused_with_the_reason(ray_cluster, group):
    starting = threading.Thread(target=ray_cluster.respawn, args=(group,))
    starting.start()
    errors = []
    while starting.is_alive():
        try:
            group.sleep(0.0)
        except RuntimeError as error:
            errors.append(str(error))
        time.sleep(0.05)
    assert errors
    assert all("its processes were ended" in error for error in errors), errors
    assert group.sleep(0.0) == "awake"


def test_a_start_that_fails_leaves_a_group_that_says_so_and_can_start_later(
    ray_cluster, group, broken
):
    broken.touch()
    with pytest.raises(ValueError, match="by design"):
        ray_cluster.respawn(group)
    assert "its processes were ended" in group.lost
    with pytest.raises(RuntimeError, match=r"cluster.respawn\(group\) starts the group again"):
        group.sleep(0.0)
    broken.unlink()
    ray_cluster.respawn(group)
    assert group.sleep(0.0) == "awake"
