"""Starting Ray on this machine, or joining a cluster that runs."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rlkit import device as devices
from rlkit.cluster.watch import reachable

logger = logging.getLogger("rlkit.cluster")


def connect(kind: str, num_devices: int, *, address: str | None) -> tuple[Any, bool, bool]:
    """(ray, whether this call started the cluster, whether it connected this process).

    ``address`` None starts a new one here, unless ``RAY_ADDRESS`` names a cluster that answers;
    ``auto`` joins the one that Ray knows of on this machine, if it answers. An address that is
    given as host:port must answer: ConnectionError.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray, False, False
    if address not in (None, "auto") and not reachable(address):
        raise ConnectionError(
            f"launch: nothing answers at address={address!r}, need host:port of a running Ray "
            "head. Leave address out to start a cluster here."
        )
    address = known_address(address) if address in (None, "auto") else address
    if address is not None:
        init(ray, {"address": address})
        return ray, False, True
    init(ray, local_options(kind, num_devices))
    return ray, True, True


def known_address(address: str | None) -> str | None:
    """The cluster that the environment (or with ``auto`` also Ray's file) names, if it answers."""
    places = {"RAY_ADDRESS": os.environ.pop("RAY_ADDRESS", "")}
    if address == "auto":
        file = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
        places[str(file.name)] = file.read_text().strip() if file.exists() else ""
    for place, found in places.items():
        if found not in ("", "local", "auto"):
            if reachable(found):
                return found
            logger.warning("%s=%s does not answer: starting a cluster here", place, found)
    return None


def local_options(kind: str, num_devices: int) -> dict[str, Any]:
    """Options of ray.init for a cluster of this machine with ``num_devices`` of a kind."""
    options = {"address": "local", "include_dashboard": False}
    options["object_store_memory"] = object_store_bytes()
    return options | devices.ray_options(kind, num_devices)


def object_store_bytes() -> int:
    """Room for rows: 3/10 of the memory, as Ray takes, if shared memory has so much; or 1 GiB.

    Pages are taken from the machine when they are used first.
    """
    shared = Path("/dev/shm")
    if not shared.exists():
        return 1 << 30
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = min(memory * 3, shutil.disk_usage(shared).free * 9) // 10
    return max(1 << 30, most)


def init(ray: Any, options: dict[str, Any]) -> None:
    """ray.init, again if its processes miss Ray's fixed 30 s to start, as on a busy machine."""
    options = options | {"logging_level": logging.ERROR}
    for tries_left in (2, 1, 0):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if not tries_left:
                raise TimeoutError(
                    "launch: Ray's processes did not start within 30 s, three times; Ray does not "
                    "let us change that. Is this machine busy? Try again when it is less so, or "
                    "use rk.launch(backend='local'): one process, no Ray."
                ) from error
            logger.warning("Ray did not start within 30 s; trying again")


def import_ray() -> Any:
    """Ray, imported with its noise turned off."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # A call after shutdown must fail, and not start or join some cluster by itself.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's idle workers, one a CPU, would compete with the start of ours, which are actors.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    devices.quiet_detection()
    import ray

    return ray
