"""One engine on a virtual clock: continuous batching without a loop over tokens.

Between two events the rows are the same, each gets a token a step, and a step costs a constant plus
a constant times the tokens held. The seconds of n steps are then quadratic in n, so an event costs
a logarithm of the rows, whatever the lengths.
"""

import heapq
import math
from collections import deque

from rlkit.sim.cost import decode_step, prefill
from rlkit.sim.work import Run

TINY = 1e-9


class Engine:
    """Rows that run and rows that wait. Times are virtual seconds; each call comes in order."""

    def __init__(self, run: Run, max_rows: int, base_s: list[float]) -> None:
        """``base_s`` is filled with the seconds of a step by rows; equal engines share it."""
        self.max_rows = max_rows
        self.clock_s = 0.0
        self.context = 0.0
        """Tokens in the cache."""
        self.stamp = 0
        """Counts changes, so that an event planned before one is known to be stale."""
        self.slow = 1.0
        """Factor on seconds, while other workers use the same cores; set after ``advance``."""
        self.busy_since_s = 0.0
        self.decoded = 0.0
        """Tokens generated so far."""
        self._steps = 0.0
        self._run, self._prompt = run, float(run.workload.prompt_tokens)
        self._ends: list[tuple[float, float, int]] = []  # (step it ends at, length, group)
        self._waiting: deque[tuple[float, int]] = deque()
        self._base_s = base_s  # of a step of so many rows that hold nothing
        self._slope_s = decode_step(run, 1, 1.0).seconds - decode_step(run, 1, 0.0).seconds
        # Latencies come once a pass, whose tokens are many, so they are left out a token.
        none_s = prefill(run, 0.0, 0.0).seconds
        self._prefill_s = prefill(run, 1.0, 0.0).seconds - none_s
        self._square_s = prefill(run, 0.0, 1.0).seconds - none_s

    @property
    def running(self) -> int:
        """Rows that run."""
        return len(self._ends)

    @property
    def load(self) -> int:
        """Rows that run or wait."""
        return len(self._ends) + len(self._waiting)

    def add(self, now_s: float, group: int, lengths: list[float]) -> None:
        """Queue a group's rows; their common prompt is read once."""
        self.advance(now_s)
        if not self._ends:
            self.busy_since_s = max(now_s, self.clock_s)
        self._waiting.extend((length, group) for length in lengths)
        read_s = self._prefill_s * self._prompt + self._square_s * self._prompt**2
        self._stall(self.slow * read_s)
        self._fill()

    def next_end_s(self) -> float:
        """When the next row finishes if nothing else happens; ``inf`` if none runs."""
        if not self._ends:
            return math.inf
        rows, steps = len(self._ends), max(0.0, self._ends[0][0] - self._steps)
        a_step = self._base(rows) + self._slope_s * self.context
        seconds = steps * a_step + self._slope_s * rows * steps * steps / 2.0
        return self.clock_s + self.slow * seconds

    def finish(self, now_s: float) -> list[tuple[int, float]]:
        """Groups and lengths of the rows that are done at ``now_s``."""
        self.advance(now_s)
        done: list[tuple[int, float]] = []
        ends = self._ends
        while ends and ends[0][0] <= self._steps + 1e-6:
            _, length, group = heapq.heappop(ends)
            self.context -= self._prompt + length
            done.append((group, length))
        self._fill()
        return done

    def interrupt(self, now_s: float, load_s: float) -> float:
        """Stop, load weights, compute the cache of all that is written again: its seconds."""
        self.advance(now_s)
        rows = len(self._ends)
        mean = self.context / rows if rows else 0.0
        again_s = self._prefill_s * self.context + self._square_s * rows * mean * mean
        again_s *= self.slow
        self._stall(load_s + again_s)
        return again_s

    def advance(self, now_s: float) -> None:
        """Decode until ``now_s``."""
        seconds = now_s - self.clock_s
        self.stamp += 1
        if seconds <= 0.0:
            return
        self.clock_s = now_s
        rows = len(self._ends)
        if not rows:
            return
        seconds /= self.slow
        a_step = self._base(rows) + self._slope_s * self.context
        grow = self._slope_s * rows
        if grow * seconds < TINY * a_step * a_step:
            steps = seconds / a_step
        else:
            steps = (math.sqrt(a_step * a_step + 2.0 * grow * seconds) - a_step) / grow
        self._steps += steps
        self.context += rows * steps
        self.decoded += rows * steps

    def _stall(self, seconds: float) -> None:
        self.clock_s += seconds
        self.stamp += 1

    def _fill(self) -> None:
        while self._waiting and len(self._ends) < self.max_rows:
            length, group = self._waiting.popleft()
            heapq.heappush(self._ends, (self._steps + length, length, group))
            self.context += self._prompt

    def _base(self, rows: int) -> float:
        base = self._base_s
        while len(base) <= rows:
            base.append(decode_step(self._run, len(base), 0.0).seconds)
        return base[rows]
