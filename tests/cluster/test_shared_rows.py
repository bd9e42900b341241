"""Large rows lie in a node's object store once, and whoever reads there maps them."""

import os
import signal

import numpy as np
import pytest
import torch

from rlkit.batch.rows import Rows
from rlkit.cluster.shared import LEAST_BYTES, SharedRows

pytestmark = pytest.mark.ray
TOKENS = LEAST_BYTES // 8  # int64


class Reader:
    """Puts and reads large rows in a process of its own."""

    def __init__(self, dock):
        self.dock = dock

    def put(self, uids):
        values = torch.arange(len(uids) * TOKENS)
        self.dock.put({"x": Rows(values, torch.full((len(uids),), TOKENS))}, uids)

    def read(self, uids):
        rows = self.dock.fetch(uids, ["x"]).columns["x"].load()
        return isinstance(rows, SharedRows), int(rows.values.sum())

    def keep(self, uids):
        self.rows = self.dock.fetch(uids, ["x"]).columns["x"].load()

    def kept(self):
        return int(self.rows.values.sum())

    def pid(self):
        return os.getpid()


@pytest.fixture
def dock(ray_cluster):
    dock = ray_cluster.dock(timeout_s=20.0)
    yield dock
    dock.transport.close()


def total(first, rows):
    return int(np.arange(first * TOKENS, (first + rows) * TOKENS).sum())


def test_a_whole_write_is_mapped_and_a_part_of_it_copied(ray_cluster, dock):
    one, two = (ray_cluster.spawn(Reader, dock, name=name) for name in ("writer", "reader"))
    one.put(np.arange(3))
    assert two.read([0, 1, 2]) == (True, total(0, 3))
    assert two.read([1]) == (False, total(1, 1))


def test_rows_outlive_the_process_that_wrote_them(ray_cluster, dock):
    one, two = (ray_cluster.spawn(Reader, dock, name=name) for name in ("mortal", "heir"))
    one.put(np.arange(2))
    os.kill(one.pid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="mortal/0 died"):
        one.pid()
    assert two.read([0, 1])[1] == total(0, 2)
    assert two.read([1])[1] == total(1, 1)


def test_rows_that_were_read_outlive_the_dock(ray_cluster, dock):
    hand = ray_cluster.spawn(Reader, dock, name="keeper")
    hand.put(np.arange(2))
    hand.keep([0, 1])
    dock.clear(np.arange(2))
    hand.put(10 + np.arange(2))  # may take the memory of rows that nobody has
    assert hand.kept() == total(0, 2)


def test_what_the_caller_changes_after_a_put_does_not_change_the_rows(dock):
    values = torch.ones(2, TOKENS, dtype=torch.int64)
    dock.put({"x": values, "small": values[:, :2]}, np.arange(2))
    values.zero_()
    found = dock.fetch(np.arange(2), ["x", "small"])
    assert found["x"].min() == 1
    assert found["small"].min() == 1
