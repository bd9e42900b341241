"""The resharding flow: weights from the training layout to the generation layout."""

from rlkit.reshard.plan import ReshardPlan, TensorFacts
from rlkit.reshard.resharder import Resharder, ReshardReport

__all__ = ["ReshardPlan", "ReshardReport", "Resharder", "TensorFacts"]
