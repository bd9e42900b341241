"""Experiment 030 on small sizes: bytes counted on Ray are those predicted."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from rlkit.dock import GRPO

pytestmark = pytest.mark.ray
FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "030_sample_flow"


@pytest.fixture(scope="module")
def flow():
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # workers have the driver's path, and import it there
    return importlib.import_module("flow")


@pytest.mark.parametrize("central", [False, True])
def test_bytes_of_the_flow_are_those_predicted(ray_cluster, flow, central):
    config = flow.FlowConfig(prompt_tokens=40, response_tokens=80)
    dock = ray_cluster.dock(graph=GRPO, central=central, timeout_s=30)
    num_nodes = len(dock.transport.nodes)
    group = ray_cluster.spawn(flow.Station, n=num_nodes, name=f"station_{central}")
    uids, received = np.arange(16 * num_nodes), ray_cluster.store.received_bytes
    found = flow.one_batch(dock, group, uids, config, None)
    assert found["all_nodes_bytes"] > 16 * 80 * 8
    assert abs(found["all_nodes_error"]) < 0.02
    assert (
        dock.transport.warehouses("stats", {dock.transport.nodes[0]: ()}).popitem()[1].value["rows"]
        == 0
    )
    assert ray_cluster.store.received_bytes - received < 20_000
    dock.transport.close()
