"""Clusters: launch, spawn, respawn, shutdown; groups of workers."""

from rlkit.cluster.feed import RolloutFeed
from rlkit.cluster.group import Future, WorkerGroup
from rlkit.cluster.launch import launch

__all__ = ["Future", "RolloutFeed", "WorkerGroup", "launch"]
