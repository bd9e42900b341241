"""rk.launch: one line from a notebook to a cluster."""

import atexit
import logging
from typing import Any

from rlkit import device
from rlkit.checks import whole
from rlkit.cluster.local import LocalCluster

logger = logging.getLogger("rlkit.cluster")
_current: list[Any] = []


def launch(
    *,
    backend: str = "ray",
    devices: str = "auto",
    num_devices: int | None = None,
    seed: int = 0,
    address: str | None = None,
    threads_per_worker: int = 1,
    timeout_s: float = 600.0,
) -> Any:
    """Start a cluster; a Ray cluster that this process launched before is shut down first.

    backend: ``ray`` starts Ray on this machine (or joins the one at ``address``); ``local`` runs
    all workers in this process. devices: ``cpu``, an accelerator's name, or ``auto`` for what the
    machine has. num_devices: how many workers fit (a CPU counts as 8 devices, which share its
    cores). seed: of all sampling. threads_per_worker: CPU threads of each worker process, with
    ``local`` of this one. timeout_s: limit of every wait.
    """
    if backend not in ("ray", "local"):
        raise ValueError(f"backend: got {backend!r}, need 'ray' or 'local'.")
    whole("seed", seed, least=0)
    whole("threads_per_worker", threads_per_worker)
    if num_devices is not None:
        whole("num_devices", num_devices)
    if timeout_s <= 0:
        raise ValueError(f"timeout_s: got {timeout_s}, need more than 0 seconds.")
    facts = device.platform(devices)
    found = device.num_devices(facts.kind)
    if found == 0 and address is None:
        raise ValueError(
            f"launch: got devices={devices!r}, and this machine has none that this torch can use. "
            "Use devices='auto' or 'cpu', or address= of a cluster that has them."
        )
    wanted = num_devices or (max(8, found) if facts is device.CPU else found)
    if facts is not device.CPU and address is None and wanted > found:
        raise ValueError(
            f"launch: got num_devices={wanted} of kind {facts.kind!r}, need at most {found}, what "
            "this machine has. Use fewer, devices='cpu', or address= of a cluster that has them."
        )
    if backend == "local":
        return LocalCluster(device=facts.kind, seed=seed, threads=threads_per_worker)
    while _current:
        old = _current.pop()
        if old.open:
            logger.warning("rk.launch: shutting down the Ray cluster launched before")
            old.shutdown()
    from rlkit.cluster.ray_cluster import RayCluster

    cluster = RayCluster(
        device=facts.kind,
        num_devices=wanted,
        seed=seed,
        address=address,
        threads=threads_per_worker,
        timeout_s=timeout_s,
    )
    _current.append(cluster)
    atexit.unregister(_close)
    atexit.register(_close)  # last registered runs first: before Ray's own
    return cluster


def _close() -> None:
    while _current:
        _current.pop().shutdown()
