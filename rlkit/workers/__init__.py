"""Workers: what one process does. Plain classes: they run without a cluster, too."""

from rlkit.workers.context import WorkerContext
from rlkit.workers.rollout import RolloutWorker
from rlkit.workers.train import ActorWorker, ReferenceWorker

__all__ = ["ActorWorker", "ReferenceWorker", "RolloutWorker", "WorkerContext"]
