"""The time that a worker's own work takes in an iteration, by which its peers tell whether it is slow."""

from __future__ import annotations

from collections import deque
from statistics import median

from swift_ft.logging.stats import IterationStats
from swift_ft.runtime.collaborators import Collaborators

__all__ = ["OwnWork"]

_REMEMBERED = 5
"""Iterations whose median says how long this worker takes."""


class OwnWork:
    """Measures the last iterations.

    Args:
        collaborators: the parts of the worker's runtime.
    """

    def __init__(self, collaborators: Collaborators) -> None:
        self._c = collaborators
        self._own_s: deque[float] = deque(maxlen=_REMEMBERED)  # without waits
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)  # with them

    def complete(self, stats: IterationStats, *, replayed: bool) -> None:
        """An iteration is complete. One that was replayed says nothing of those that follow."""
        c = self._c
        own_s = c.pipeline.take_computed_s() if c.pipeline is not None else stats.step_s
        own_s -= c.replicas.take_waited_s()
        if c.dealt:  # what is left grows with the share of a batch, and is compared with other shares
            own_s -= c.replicas.take_since_averages_s()
        if not replayed:
            self._own_s.append(max(0.0, own_s))
            self._step_s.append(stats.step_s)

    def forget(self) -> None:
        """What follows is other work."""
        self._own_s.clear()
        self._step_s.clear()

    def medians(self) -> tuple[float, float] | tuple[None, None]:
        """Seconds of an iteration, without waits and with them; None as long as too few are known."""
        if len(self._own_s) < _REMEMBERED:
            return None, None
        return median(self._own_s), median(self._step_s)
