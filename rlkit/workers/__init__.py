"""Workers: what one process does. Plain classes: they run without a cluster, too."""

from rlkit.workers.context import WorkerContext
from rlkit.workers.reference import ReferenceWorker
from rlkit.workers.rollout import RolloutWorker
from rlkit.workers.train import ActorWorker, CriticWorker

__all__ = ["ActorWorker", "CriticWorker", "ReferenceWorker", "RolloutWorker", "WorkerContext"]
