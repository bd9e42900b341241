"""Where the workers of a group run: in a placement group, one bundle a worker."""

from typing import Any

from rlkit import device as devices

WAIT_S = 60.0


def reserve(kind: str, n: int, *, name: str) -> Any:
    """A placement group of ``n`` devices: CPUs spread over nodes, accelerators packed.

    An error says what is needed and what is free.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    resource = devices.platform(kind).ray_resource
    total, free = ray.cluster_resources(), ray.available_resources()
    if total.get(resource, 0) < n:
        raise ValueError(
            f"spawn {name}: needs {n} x {resource}, the cluster has {total.get(resource, 0):.0f} "
            f"({free.get(resource, 0):.0f} free). Use fewer workers, colocate_with=, or more nodes."
        )
    # Ranks on CPUs gain from more machines; on accelerators from the links inside one.
    strategy = "SPREAD" if resource == devices.CPU.ray_resource else "PACK"
    group = placement_group([{resource: 1}] * n, strategy=strategy)
    if not group.wait(WAIT_S):
        free = ray.available_resources()
        remove_placement_group(group)
        raise ValueError(
            f"spawn {name}: needs {n} x {resource}, {free.get(resource, 0):.0f} of "
            f"{total.get(resource, 0):.0f} are free and no more became so in {WAIT_S:.0f} s. "
            "Del a group you need no more, use fewer workers, or colocate_with=."
        )
    return group


def release(group: Any) -> None:
    """Give the devices of a placement group back."""
    from ray.util.placement_group import remove_placement_group

    remove_placement_group(group)


def options(kind: str, group: Any, bundle: int, *, owns: bool) -> dict[str, Any]:
    """Ray options of the worker in a bundle: the device if it ``owns`` it, else only the place."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    at = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    taken = {"num_cpus": 0} | (devices.ray_options(kind, 1) if owns else {})
    return taken | {"scheduling_strategy": at}


def shared_visibility(kind: str, accelerators: dict[str, list[str]]) -> dict[str, Any]:
    """Ray options that show a colocated worker the devices of the worker it sits beside."""
    facts = devices.platform(kind)
    ids = accelerators.get(facts.ray_resource, [])
    if not facts.visible_variable or not ids:
        return {}
    return {"runtime_env": {"env_vars": {facts.visible_variable: ",".join(ids)}}}
