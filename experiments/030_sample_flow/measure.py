"""Clusters of several raylets on this machine, and what a batch costs on them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flow
import numpy as np
import pandas as pd

import rlkit as rk
from rlkit.dock import GRPO, Graph, Stage, predicted_traffic

UNITS = {"s": "s", "bytes": "B", "error": "1", "gib": "GiB"}
BANDWIDTHS = {  # bytes/s of a node
    "RDMA, 4 x 200 Gbit/s": 87e9,  # Mooncake's documentation, of its transfer engine
    "TCP, 4 x 200 Gbit/s": 36e9,  # the same
    "effective, all through one object store": 0.05e9,  # verl-project/verl#2847
}
R1 = {"groups": 384, "n": 32, "prompt_len": 1024, "response_len": 2048}  # 384 NPUs of MindSpeed RL
DEVICES_A_NODE = 8
SPREAD = Graph((Stage("task", writes=("prompt_ids",)), *GRPO.stages[1:]))
FLOWS = {"TransferDock": GRPO, "CentralDock": GRPO, "TransferDock, prompts spread": SPREAD}


@contextmanager
def cluster_of(num_nodes: int) -> Iterator[Any]:
    """A cluster of so many raylets on this machine."""
    nodes = raylets(num_nodes)
    try:
        with rk.launch(devices="cpu", address=nodes.address) as cluster:
            yield cluster
    finally:
        nodes.shutdown()


def raylets(num: int, *, tries: int = 4) -> Any:
    """Ray's own cluster of raylets; the first has memory for all rows.

    On a busy machine one may miss Ray's fixed 30 s to start: then all start again.
    """
    from rlkit.cluster.connect import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    args = {"num_cpus": 2, "object_store_memory": 3 << 29}
    for left in reversed(range(tries)):
        nodes = Cluster()
        try:
            nodes.add_node(**args, include_dashboard=False)
            for _ in range(num - 1):
                nodes.add_node(**args | {"object_store_memory": 400 << 20})
            return nodes
        except Exception as error:
            nodes.shutdown()
            if not left:
                raise
            print(f"{num} raylets: {error}; once more")
    raise AssertionError


def on_cluster(num_nodes: int, config: flow.FlowConfig) -> pd.DataFrame:
    """Tidy rows of both docks and all batch sizes, measured and with emulated links.

    The docks take turns in going first, since the second finds memory that the first has touched.
    """
    found, start = [], 0
    with cluster_of(num_nodes) as cluster:
        group = cluster.spawn(flow.Station, n=num_nodes)
        import ray

        wire, places = ray.remote(num_cpus=0)(flow.Wire), flow.listed(group.node())
        wires = {node: wire.remote() for node in places}
        assert len(wires) == num_nodes, "a station a node"
        most = [config.most_rows] if num_nodes <= config.few_nodes else []
        docks = [cluster.dock(graph=GRPO, central=c, timeout_s=300) for c in (False, True)]
        kinds = {"measured": None} | ({"emulated": wires} if num_nodes > 1 else {})
        batches = itertools.product(
            sorted({*config.rows, *most}), range(config.repeats + 1), kinds.items()
        )
        for rows, turn, (source, links) in batches:
            for dock in docks if turn % 2 else reversed(docks):
                uids = start + np.arange(rows)
                start += rows
                facts = flow.one_batch(dock, group, uids, config, links)
                if turn:  # the first warms up
                    found += tidy(facts, source, dock, num_nodes, rows, turn - 1)
        memory = {"memory_gib": flow.memory_gib()}
        for dock in docks:
            found += tidy(memory, "measured", dock, num_nodes, max(config.rows), 0)
            dock.transport.close()
        print(f"{num_nodes} nodes: {memory['memory_gib']:.1f} GiB")
    return pd.DataFrame(found)


def tidy(facts: dict, source: str, dock: Any, nodes: int, rows: int, turn: int) -> list[dict]:
    """A row a fact; predicted bytes are simulated, and bytes are the same with emulated links."""
    kind, found = type(dock).__name__, []
    for name, value in facts.items():
        if source == "emulated" and name != "dispatch_s":
            continue
        found.append(
            {
                "run": f"{kind}, {rows} rows", "system": kind, "model": "none", "devices": nodes,
                "seed": 0, "step": turn, "metric": f"dock/{name}", "value": value,
                "unit": UNITS[name.rpartition("_")[2]],
                "source": "simulated" if "predicted" in name else source,
            }
        )  # fmt: skip
    return found


def extrapolated() -> pd.DataFrame:
    """Seconds in which the busiest node's link moves R1's batch, from the predicted bytes."""
    found = []
    for num_nodes in (1, 2, 4, 8, 16, 24, 32, 48):
        nodes = [f"node{i}" for i in range(num_nodes)]
        for kind, graph in FLOWS.items():
            central = kind == "CentralDock"
            nbytes = flow.busiest(predicted_traffic(graph, **R1, nodes=nodes, central=central))
            for name, rate in BANDWIDTHS.items():
                row = {"run": f"{kind}: {name}", "system": kind, "model": "DeepSeek-R1-671B"}
                row |= {"devices": num_nodes * DEVICES_A_NODE, "seed": 0, "step": 0}
                row |= {"metric": "dock/link_s", "value": nbytes / rate, "unit": "s"}
                found.append(row | {"source": "simulated"})
    return pd.DataFrame(found)
