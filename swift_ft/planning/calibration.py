"""Measured recoveries instead of assumed ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_ft.errors import UsageError
from swift_ft.planning.strategies import Cluster, Strategy

__all__ = ["MeasuredRecovery", "calibrate"]


@dataclass(frozen=True)
class MeasuredRecovery:
    """One recovery, as a benchmark measured it.

    Attributes:
        strategy: which strategy it was, by name.
        startup_s: from the death until the replacement had joined.
        restore_s: to load, or to undo and broadcast, the state that recovery began with.
        replay_s: to come back to the iteration of the failure.
        replayed_iterations: how many iterations that were.
        iteration_s: what one takes without failures.
    """

    strategy: str
    startup_s: float
    restore_s: float
    replay_s: float
    replayed_iterations: float
    iteration_s: float


def calibrate(
    strategies: Sequence[Strategy], cluster: Cluster, measured: Sequence[MeasuredRecovery]
) -> tuple[tuple[Strategy, ...], Cluster]:
    """Strategies and cluster with the means of what was measured; what was not stays as it is.

    The cluster's start-up becomes the mean over all recoveries, counted as join time, and a strategy's own
    deviation from it is dropped.

    Raises:
        UsageError: if a measured strategy is none of those to simulate.
    """
    known = {strategy.name for strategy in strategies}
    for record in measured:
        if record.strategy not in known:
            raise UsageError(f"measured strategy {record.strategy!r} is none of {', '.join(sorted(known))}")
    if not measured:
        return tuple(strategies), cluster
    startup = statistics.fmean(record.startup_s for record in measured)
    cluster = replace(cluster, detection_s=0.0, replacement_s=0.0, join_s=startup)
    return tuple(_with(strategy, measured) for strategy in strategies), cluster


def _with(strategy: Strategy, measured: Sequence[MeasuredRecovery]) -> Strategy:
    mine = [record for record in measured if record.strategy == strategy.name]
    if not mine:
        return replace(strategy, extra_startup_s=0.0)
    again = sum(record.replayed_iterations * record.iteration_s for record in mine)
    factor = sum(record.replay_s for record in mine) / again if again else strategy.replay_factor
    restore = statistics.fmean(record.restore_s for record in mine)
    return replace(strategy, restore_s=restore, replay_factor=factor, extra_startup_s=0.0)
