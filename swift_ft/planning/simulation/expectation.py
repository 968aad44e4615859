"""Closed forms for the expected training time, as a check of the simulation.

With a rate ``r`` of failures on the wall clock, time ``d`` that must pass without a failure takes
``(e^(r d) - 1) / r`` on average when every failure restarts it, and ``(e^(r d) - 1) (1 / r + D)`` when each
failure also costs ``D`` (Daly 2006). Failures during a recovery restart it. In the simulation unrelated
recoveries run in parallel, so the closed form is a little high if recoveries overlap often. The forms ignore
spares, bursts and the ages of machines.
"""

from __future__ import annotations

import math

from swift_ft.planning.simulation.failure_laws import FailureLaw
from swift_ft.planning.simulation.strategies import Cluster, Strategy


def expected_s(strategy: Strategy, work_s: float, cluster: Cluster, law: FailureLaw) -> float:
    """Expected wall-clock seconds of a run; inf on overflow."""
    s, calm = strategy, strategy.undisturbed_s(work_s)
    rate = law.rate(cluster.machines, work_s)
    down = cluster.startup_s + s.extra_startup_s + s.restore_s
    interval = min(s.save_interval_s, work_s)
    if law.on_work or rate == 0:
        # a known number of failures, none during a recovery; each loses half an interval on average
        behind = {"rollback": interval * (1 + s.slowdown), "logging": interval * s.replay_factor}.get(
            s.kind, 0.0
        )
        return calm + rate * work_s * (down + behind / 2)
    try:
        if s.kind == "rollback":
            pieces = max(1.0, work_s / interval)
            return pieces * math.expm1(rate * calm / pieces) * (1 / rate + _anew(rate, down, 0.0))
        replay = s.replay_factor * interval if s.kind == "logging" else 0.0
        return calm * (1 + rate * _anew(rate, down, replay))
    except OverflowError:
        return math.inf


def _anew(rate: float, down: float, replay: float) -> float:
    """Mean seconds of ``down`` plus a uniform part of ``replay``, restarted by every failure."""
    x = rate * replay
    grown = math.exp(rate * down) * (math.expm1(x) / x if x > 1e-12 else 1.0)
    return (grown - 1) / rate
