"""Work of the trainer at a pace that may change."""

from typing import Any


class Job:
    """A piece of work of the trainer, at a pace that may change."""

    def __init__(self, now_s: float, stages: dict[str, float], facts: dict[str, Any]) -> None:
        self.start_s = self._at_s = now_s
        self.slow = 1.0
        self.facts = facts
        self.stamp = 0
        """Counts changes of pace, as an engine's."""
        self._stages = stages
        self._left_s = sum(stages.values())

    def pace(self, now_s: float, slow: float) -> float:
        """Go on ``slow`` times slower than alone: when it ends."""
        self._left_s -= (now_s - self._at_s) / self.slow
        self._at_s, self.slow = now_s, slow
        self.stamp += 1
        return now_s + slow * self._left_s

    def stages(self, now_s: float) -> dict[str, float]:
        """Seconds of each stage, now that it has ended: all as much slower as the whole."""
        alone_s = sum(self._stages.values())
        longer = (now_s - self.start_s) / alone_s if alone_s else 1.0
        return {stage: longer * seconds for stage, seconds in self._stages.items()}
