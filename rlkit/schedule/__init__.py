"""Orders of the stages of a run, and the rule that bounds how stale its samples may be."""

from rlkit.schedule.staleness import StalenessRule

__all__ = ["StalenessRule"]
