"""Launching: local and Ray, again and again, wrong arguments; nothing stays behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit as rk


def test_unknown_backend_lists_the_known_ones():
    with pytest.raises(ValueError, match="need 'ray' or 'local'"):
        rk.launch(backend="slurm")


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(ValueError, match="need one of auto"):
        rk.launch(devices="tpu")


def test_zero_devices_is_an_error():
    with pytest.raises(ValueError, match="num_devices: got 0"):
        rk.launch(num_devices=0)


def test_a_local_cluster_has_one_worker_a_group():
    with pytest.raises(ValueError, match="backend='local' has one process"):
        rk.launch(backend="local").spawn(rk.RolloutWorker, rk.models.tiny(), n=2)


def test_a_closed_local_cluster_says_so():
    cluster = rk.launch(backend="local")
    group = cluster.spawn(rk.RolloutWorker, rk.models.tiny())
    cluster.shutdown()
    with pytest.raises(RuntimeError, match=r"rollout\.version: the cluster was shut down"):
        _ = group.version
    with pytest.raises(RuntimeError, match="launch a new one"):
        group.pause()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left_running")
def test_launching_again_replaces_the_first_cluster():
    code = """
import rlkit as rk
class Toy:
    def one(self): return 1
first = rk.launch(num_devices=2)
toy = first.spawn(Toy)
second = rk.launch(num_devices=2)
assert not first.open and second.spawn(Toy).one() == 1
try:
    toy.one()
except RuntimeError as error:
    print("closed:", error)
"""  # no shutdown: ending the process must be enough
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "closed: toy.one: the cluster was shut down" in done.stdout


def test_the_object_store_has_room_for_rows_but_no_more_than_shared_memory():
    from rlkit.cluster.connect import object_store_bytes

    found = object_store_bytes()
    assert found >= 1 << 30
    shared = Path("/dev/shm")
    assert found == 1 << 30 or found <= shutil.disk_usage(shared).total
