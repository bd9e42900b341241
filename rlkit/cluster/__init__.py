"""Clusters: launch, spawn, respawn, shutdown; groups of workers."""

from rlkit.cluster.feed import RolloutFeed
from rlkit.cluster.futures import Future
from rlkit.cluster.group import WorkerGroup
from rlkit.cluster.launch import launch

__all__ = ["Future", "RolloutFeed", "WorkerGroup", "launch"]
