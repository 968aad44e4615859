"""The time that a worker's own work takes in an iteration, by which its peers tell whether it is slow."""

from __future__ import annotations

from collections import deque
from statistics import median

from swift_ft.logging.stats import IterationStats
from swift_ft.runtime.data.dealing import DealtBatches
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.replicas.replicas import Replicas

_REMEMBERED = 5
"""Iterations whose median says how long this worker takes."""


class OwnWork:
    """Measures the last iterations.

    Args:
        pipeline: the worker's stages; None without any.
        replicas: measure their waits.
        dealt: the batches that are dealt to them.
    """

    def __init__(self, pipeline: LoggedPipeline | None, replicas: Replicas, dealt: DealtBatches) -> None:
        self._pipeline = pipeline
        self._replicas = replicas
        self._dealt = dealt
        self._own_s: deque[float] = deque(maxlen=_REMEMBERED)  # without waits
        self._step_s: deque[float] = deque(maxlen=_REMEMBERED)  # with them

    def complete(self, stats: IterationStats, *, replayed: bool) -> None:
        """An iteration is complete. One that was replayed says nothing of those that follow."""
        own_s = self._pipeline.take_computed_s() if self._pipeline is not None else stats.step_s
        own_s -= self._replicas.take_waited_s()
        if self._dealt:  # what is left grows with the share of a batch, and is compared with other shares
            own_s -= self._replicas.take_since_averages_s()
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
