"""The times at which the faults of a simulated job strike, and what they excuse."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass


class FaultTiming:
    """The number of faults, and their times.

    Args:
        rng: the run's random numbers.
        patience: how often the first fault waits until all workers train.

    Attributes:
        budget: faults left.
    """

    def __init__(self, rng: random.Random, patience: float) -> None:
        self.budget = rng.choice((0, 1, 2, 2, 3, 4, 5, 7))
        self._rng = rng
        self._waits_until_live = rng.random() < patience
        self._quiet_until = (
            sys.maxsize if self._waits_until_live else rng.choice((0, 100, 150, 200, 300, 400))
        )
        self._rate = rng.choice((0.002, 0.005, 0.03))
        self._provoked_at = -1

    def is_due(self, tick: int) -> bool:
        """Whether a fault strikes now."""
        if not self.budget or tick <= self._quiet_until:
            return False
        return tick == self._provoked_at or self._rng.random() < self._rate

    def provoke(self, tick: int, chance: float, delays: Sequence[int]) -> None:
        """A fault may strike soon, after one of these numbers of ticks, if any is left."""
        if self.budget and self._rng.random() < chance:
            self._provoked_at = tick + self._rng.choice(delays)

    def job_is_live(self, tick: int) -> None:
        """All workers train. The first fault that waited for this may come."""
        if self._waits_until_live:
            self._waits_until_live = False
            self._quiet_until = tick + self._rng.choice((0, 50, 50, 100, 150, 200))


@dataclass(slots=True)
class Excuses:
    """What excuses a job that ends without success.

    Attributes:
        may_fail: a fault struck after which the job may end in any way.
        struck: any fault struck.
        left_early: a script left the loop before the others.
        damaged: a committed checkpoint is not what was saved.
    """

    may_fail: bool = False
    struck: bool = False
    left_early: bool = False
    damaged: bool = False

    def cover(self, reason: str, supply: int) -> bool:
        """Whether a job may end for this reason, with so many machines left to replace lost ones."""
        if self.may_fail or (reason in ("abandoned", "no machine came") and not supply):
            return True
        if "no intact checkpoint is left" in reason and self.damaged:
            return True
        limits = ("way back is left", "more than the limit", "after the last iteration")
        return self.struck and any(limit in reason for limit in limits)
