"""Measured recoveries instead of assumed ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_ft.errors import UsageError
from swift_ft.planning.simulation.strategies import Cluster, Strategy


@dataclass(frozen=True)
class MeasuredRecovery:
    """One recovery, as a benchmark measured it.

    Attributes:
        strategy: the strategy's name.
        startup_s: from the death until the replacement had joined.
        restore_s: to load, or to undo and broadcast, the state that recovery began with.
        replay_s: from that state until the iteration of the failure is reached again.
        replayed_iterations: number of replayed iterations.
        iteration_s: duration of an iteration without failures.
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
    """Strategies and cluster with measured means; values without a measurement are unchanged.

    The shortest mean start-up of a measured strategy becomes the cluster's, counted as join time. What other
    strategies need beyond it is their extra start-up time.

    Raises:
        UsageError: if a measured strategy is not simulated.
    """
    by_strategy: dict[str, list[MeasuredRecovery]] = {strategy.name: [] for strategy in strategies}
    for record in measured:
        if record.strategy not in by_strategy:
            raise UsageError(
                f"measured strategy {record.strategy!r} is none of {', '.join(sorted(by_strategy))}"
            )
        by_strategy[record.strategy].append(record)
    if not measured:
        return tuple(strategies), cluster
    startup = {
        name: statistics.fmean(record.startup_s for record in mine)
        for name, mine in by_strategy.items()
        if mine
    }
    shortest = min(startup.values())
    cluster = replace(cluster, detection_s=0.0, replacement_s=0.0, join_s=shortest)
    return tuple(
        _with(strategy, by_strategy[strategy.name], startup.get(strategy.name, shortest) - shortest)
        for strategy in strategies
    ), cluster


def _with(strategy: Strategy, mine: Sequence[MeasuredRecovery], extra_startup_s: float) -> Strategy:
    strategy = replace(strategy, extra_startup_s=extra_startup_s)
    if not mine:
        return strategy
    again = sum(record.replayed_iterations * record.iteration_s for record in mine)
    factor = sum(record.replay_s for record in mine) / again if again else strategy.replay_factor
    return replace(
        strategy, restore_s=statistics.fmean(record.restore_s for record in mine), replay_factor=factor
    )
