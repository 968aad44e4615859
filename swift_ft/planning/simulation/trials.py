"""End-to-end training time under failures, trial by trial (§7.3, Appendix B), and on average."""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_positive
from swift_ft.planning.simulation.failure_laws import FailureLaw, Stream
from swift_ft.planning.simulation.strategies import Cluster, Strategy

_PATIENCE = 50.0  # a run that exceeds this multiple of its failure-free time counts as never finished


@dataclass(frozen=True)
class Run:
    """One trial of one strategy: wall-clock seconds, failures met, whether it finished."""

    wall_s: float
    failures: int
    fallbacks: int
    finished: bool


@dataclass(frozen=True)
class Outcome:
    """A strategy over all trials.

    Attributes:
        strategy: its name.
        hours: mean wall-clock hours; inf when a trial did not finish.
        ci95_hours: half width of the 95 % confidence interval of that mean (normal approximation).
        goodput: failure-free hours divided by ``hours``: the effective training time ratio.
        failures: mean failures met.
        fallbacks: mean recoveries that had to use the global checkpoint instead.
        expected_hours: the closed form, for comparison.
        finished: share of trials that finished within 50 times the failure-free time.
    """

    strategy: str
    hours: float
    ci95_hours: float
    goodput: float
    failures: float
    fallbacks: float
    expected_hours: float
    finished: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinite values become None."""
        return {k: (None if isinstance(v, float) and math.isinf(v) else v) for k, v in vars(self).items()}


def simulate(
    strategies: Sequence[Strategy],
    *,
    work_s: float,
    cluster: Cluster,
    law: FailureLaw,
    trials: int = 200,
    seed: int = 0,
) -> tuple[Outcome, ...]:
    """Runs every strategy through the same failures, ``trials`` times.

    Args:
        strategies: what to compare.
        work_s: failure-free training time, seconds.
        cluster: machines, start-up times, spares.
        law: when machines fail.
        trials: how many runs of each.
        seed: same seed, same result.

    Raises:
        UsageError: for impossible values.
    """
    check_positive({"the training time": work_s}, "number of seconds")
    if trials < 1:
        raise UsageError("at least one trial is needed")
    runs: list[list[Run]] = [[] for _ in strategies]
    for trial in range(trials):
        stream = Stream(law.draw(cluster.machines, work_s, np.random.default_rng([seed, trial, 0])))
        for k, strategy in enumerate(strategies):
            bursts = np.random.default_rng([seed, trial, 1])
            runs[k].append(_Trial(strategy, work_s, cluster, stream, law.on_work, bursts).run())
    return tuple(
        _outcome(strategy, done, work_s, cluster, law)
        for strategy, done in zip(strategies, runs, strict=True)
    )


def _outcome(
    strategy: Strategy, runs: list[Run], work_s: float, cluster: Cluster, law: FailureLaw
) -> Outcome:
    hours = [run.wall_s / 3600 for run in runs]
    finished = statistics.fmean(run.finished for run in runs)
    mean = statistics.fmean(hours) if finished == 1 else math.inf
    spread = statistics.stdev(hours) / math.sqrt(len(hours)) if len(hours) > 1 else math.inf
    return Outcome(
        strategy=strategy.name,
        hours=mean,
        ci95_hours=1.96 * spread if finished == 1 else math.inf,
        goodput=work_s / 3600 / mean,
        failures=statistics.fmean(run.failures for run in runs),
        fallbacks=statistics.fmean(run.fallbacks for run in runs),
        expected_hours=expected_s(strategy, work_s, cluster, law) / 3600,
        finished=finished,
    )


class _Trial:
    """One run. Invariant between events: ``kept * save_interval <= done <= (kept + 1) * save_interval``."""

    def __init__(
        self,
        strategy: Strategy,
        work_s: float,
        cluster: Cluster,
        stream: Stream,
        on_work: bool,
        rng: np.random.Generator,
    ) -> None:
        self.strategy, self.work_s, self.cluster, self.stream = strategy, work_s, cluster, stream
        self.on_work, self.rng = on_work, rng
        self.now = 0.0  # wall clock
        self.done = 0.0  # seconds of training in the model
        self.kept = 0  # saves made
        self.index = self.fallbacks = 0
        self.pool = [0.0] * cluster.spares  # when each spare is ready
        self.pace = 1 + strategy.slowdown

    def run(self) -> Run:
        patience = _PATIENCE * self.work_s
        while True:
            time_s, machine = self.stream.get(self.index)
            if self.on_work:
                time_s = self.now + self._until(time_s) if time_s <= self.work_s else math.inf
            end = self.now + self._until(self.work_s)
            if end <= time_s:
                return Run(end, self.index, self.fallbacks, True)
            self._train(time_s - self.now)
            self.now = time_s
            self.index += 1
            self._recover(machine)
            if self.now > patience:
                return Run(self.now, self.index, self.fallbacks, False)

    def _until(self, target: float) -> float:
        """Wall-clock seconds of undisturbed training until ``target`` seconds are done."""
        stalls = max(0, self.strategy.saves(target) - self.kept) * self.strategy.save_stall_s
        return max(0.0, target - self.done) * self.pace + stalls

    def _train(self, wall_s: float) -> None:
        """Trains for ``wall_s`` seconds; a save counts once its stall is over."""
        s = self.strategy
        if math.isinf(s.save_interval_s):
            self.done += wall_s / self.pace
            return
        to_save = max(0.0, (self.kept + 1) * s.save_interval_s - self.done) * self.pace + s.save_stall_s
        if wall_s >= to_save:
            cycle = s.save_interval_s * self.pace + s.save_stall_s
            more = int((wall_s - to_save) // cycle)
            wall_s -= to_save + more * cycle
            self.kept += 1 + more
            self.done = self.kept * s.save_interval_s
        ahead = (self.kept + 1) * s.save_interval_s
        self.done = min(self.done + wall_s / self.pace, ahead)

    def _startup(self) -> float:
        """Seconds of detection, replacement (or a spare) and join; the lost machine goes to repair."""
        c = self.cluster
        wait = c.replacement_s
        if self.pool:
            ready = max(0.0, self.pool[0] - self.now)
            if ready + c.spare_s <= wait:
                heapq.heappop(self.pool)
                wait = ready + c.spare_s
        if math.isfinite(c.repair_s) and c.spares:
            heapq.heappush(self.pool, self.now + c.repair_s)
        return c.detection_s + wait + c.join_s + self.strategy.extra_startup_s

    def _recover(self, machine: int) -> None:
        """From a failure until training continues, including failures in between (Appendix B)."""
        lost = self._victims(machine)
        closed = self._replicas_lost(lost)
        end = self.now + self._startup() + self._cost(lost, closed)
        while not self.on_work:
            time_s, other = self.stream.get(self.index)
            if time_s >= end:
                break
            self.index += 1
            self.now = time_s
            more = self._victims(other)
            if self.strategy.kind == "logging" and not _connected(lost, more):
                end = max(
                    end, self.now + self._startup() + self._cost(more, False)
                )  # an independent recovery, in parallel
            else:
                lost = lost | more
                closed = closed or self._replicas_lost(lost)
                end = self.now + self._startup() + self._cost(lost, closed)
        if closed:
            self.fallbacks += 1
        if closed or self.strategy.kind == "rollback":
            kept = (
                0.0
                if math.isinf(self.strategy.save_interval_s)
                else self.kept * self.strategy.save_interval_s
            )
            self.done = kept
        self.now = end

    def _victims(self, machine: int) -> frozenset[int]:
        c = self.cluster
        if c.burst and c.machines > 1 and self.rng.random() < c.burst:
            return frozenset((machine, (machine + 1) % c.machines))
        return frozenset((machine,))

    def _replicas_lost(self, lost: frozenset[int]) -> bool:
        """Whether both replicas of some state are lost: machine i's replica is i + N / 2."""
        if self.strategy.kind != "replication":
            return False
        half = self.cluster.machines // 2
        return half == 0 or any((machine + half) % self.cluster.machines in lost for machine in lost)

    def _cost(self, lost: frozenset[int], closed: bool) -> float:
        s = self.strategy
        if closed:
            return s.fallback_restore_s
        if s.kind != "logging":
            return s.restore_s
        behind = self.done - (0.0 if math.isinf(s.save_interval_s) else self.kept * s.save_interval_s)
        return s.restore_s + behind * min(1.0, s.replay_factor * _longest_run(lost))


def _connected(lost: frozenset[int], more: frozenset[int]) -> bool:
    """Whether the two are one machine or neighbours in the pipeline, and so recover together."""
    return any(abs(a - b) <= 1 for a in lost for b in more)


def _longest_run(lost: frozenset[int]) -> int:
    """The longest run of neighbours among the lost: they are replayed as one longer sub-pipeline."""
    best = run = 0
    previous = None
    for machine in sorted(lost):
        run = run + 1 if previous is not None and machine == previous + 1 else 1
        best, previous = max(best, run), machine
    return best


# Closed forms for the expected training time, as a check of the simulation.
#
# With a rate ``r`` of failures on the wall clock, time ``d`` that must pass without a failure takes ``(e^(r
# d) - 1) / r`` on average when every failure restarts it, and ``(e^(r d) - 1) (1 / r + D)`` when each failure
# also costs ``D`` (Daly 2006). Failures during a recovery restart it. In the simulation unrelated recoveries
# run in parallel, so the closed form is a little high if recoveries overlap often. The forms ignore spares,
# bursts and the ages of machines.


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
