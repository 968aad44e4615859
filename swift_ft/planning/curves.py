"""Training time against checkpoint interval and failure frequency (figures 13 and 14)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swift_ft.planning.presets import Workload
from swift_ft.planning.simulation.failure_laws import FailureLaw, UniformCount
from swift_ft.planning.simulation.strategies import Strategy
from swift_ft.planning.simulation.trials import expected_s


@dataclass(frozen=True)
class Curve:
    """Expected hours of a strategy against the varied quantity (in hours, too)."""

    strategy: str
    x_hours: tuple[float, ...]
    hours: tuple[float, ...]


def interval_curves(workload: Workload, points: int = 40) -> tuple[Curve, ...]:
    """Figure 13: hours against the interval between checkpoints or snapshots, in closed form.

    Replication keeps its interval, since it does not need frequent checkpoints (§7.3).
    """
    low, high = workload.work_s / 20_000, workload.work_s / 10
    grid = [low * (high / low) ** (k / (points - 1)) for k in range(points)]
    curves = []
    for strategy in _varied(workload):
        hours = [_hours(_at(strategy, x), workload, workload.law) for x in grid]
        curves.append(Curve(strategy.name, tuple(x / 3600 for x in grid), tuple(hours)))
    return tuple(curves)


def best_intervals(workload: Workload) -> tuple[Strategy, ...]:
    """Each strategy at the interval that gives the shortest training time in closed form."""
    best = []
    for strategy, curve in zip(_varied(workload), interval_curves(workload, 400), strict=True):
        k = min(range(len(curve.hours)), key=curve.hours.__getitem__)
        best.append(_at(strategy, curve.x_hours[k] * 3600))
    return tuple(best)


def mtbf_curves(
    workload: Workload, mtbf_hours: Sequence[float] = (4, 8, 12, 17, 24, 36, 48)
) -> tuple[Curve, ...]:
    """Figure 14: hours against the time between failures, each strategy at its best interval of figure 13."""
    laws = [UniformCount(round(workload.work_s / 3600 / gap)) for gap in mtbf_hours]
    return tuple(
        Curve(strategy.name, tuple(mtbf_hours), tuple(_hours(strategy, workload, law) for law in laws))
        for strategy in best_intervals(workload)
    )


def _varied(workload: Workload) -> list[Strategy]:
    return [strategy for strategy in workload.strategies if math.isfinite(strategy.save_interval_s)]


def _at(strategy: Strategy, interval_s: float) -> Strategy:
    return strategy if strategy.kind == "replication" else replace(strategy, save_interval_s=interval_s)


def _hours(strategy: Strategy, workload: Workload, law: FailureLaw) -> float:
    return expected_s(strategy, workload.work_s, workload.cluster, law) / 3600
