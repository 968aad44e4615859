"""Training on a number of nodes that changes: ways to go on, and what they yield. Pure.

A node is lost or added at given times. Each way says how fast the job is on so many nodes, and what a change
costs. Losses during a change begin it anew. A step in progress is lost by half on average (Oobleck, Table 2).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_not_negative, check_positive


class Change(NamedTuple):
    """Nodes that come (positive) or go (negative).

    Attributes:
        time_s: seconds from the start.
        nodes: how many.
    """

    time_s: float
    nodes: int


WAYS = {
    "elastic": "the pipelines are formed anew from the nodes that are there",
    "adoption": "a survivor does the work of a lost stage beside its own, until a node comes",
    "waiting": "training stops until as many nodes are there as at the start",
    "restart": "all processes start again from the last checkpoint, on the nodes that are there",
}
"""The ways to go on, and what they mean."""


@dataclass(frozen=True)
class ElasticJob:
    """A job, and what changes of its layout cost.

    Attributes:
        throughput: samples per second by number of nodes, while nothing changes. The largest number is the
            most that the job can use; below the smallest it stops. Between, the next smaller number counts.
        nodes: at the start.
        batch: samples of a step.
        change_s: to form pipelines again after a loss.
        grow_s: to take in nodes, at the end of a step.
        adopt_s: until a survivor has rebuilt the lost stage.
        restart_s: to start all processes again and load a checkpoint.
        checkpoint_interval_s: between two checkpoints; half of it is lost at a restart, on average.
        hold_s: how long nodes must stay before they are taken in, so that nodes that come and go cost little.
    """

    throughput: Mapping[int, float]
    nodes: int
    batch: float = 0.0
    change_s: float = 2.0
    grow_s: float = 2.0
    adopt_s: float = 2.0
    restart_s: float = 60.0
    checkpoint_interval_s: float = 600.0
    hold_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.throughput or min(self.throughput) < 1 or min(self.throughput.values()) < 0:
            raise UsageError("'throughput' needs samples per second for at least one number of nodes")
        if self.rate(self.nodes) <= 0:
            raise UsageError(
                f"the job begins on {self.nodes} nodes, and its throughput is known from "
                f"{min(self.throughput)} up: "
                "give a throughput for the nodes at the start"
            )
        times = ("change_s", "grow_s", "adopt_s", "restart_s", "checkpoint_interval_s", "hold_s")
        check_not_negative({repr(name): getattr(self, name) for name in ("batch", *times)})

    def rate(self, nodes: int) -> float:
        """Samples per second on so many nodes."""
        counts = sorted(self.throughput)
        index = bisect_right(counts, nodes)
        return self.throughput[counts[index - 1]] if index else 0.0


@dataclass(frozen=True)
class ElasticOutcome:
    """The yield of a way.

    Attributes:
        way: its name.
        samples: trained in all.
        throughput: samples per second on average.
        goodput: of the throughput at the start, if no node were ever lost.
        of_available: of what the available nodes would yield if changes were free.
        changes: how often the layout changed.
        down_s: time without training.
    """

    way: str
    samples: float
    throughput: float
    goodput: float
    of_available: float
    changes: int
    down_s: float

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def simulate_elastic(
    job: ElasticJob, changes: Sequence[Change], duration_s: float, way: str
) -> ElasticOutcome:
    """One way through a trace of changes.

    Args:
        job: the training.
        changes: in any order; those at the same time count together.
        duration_s: what comes later is left out.
        way: one of :data:`WAYS`.

    Raises:
        UsageError: if the trace takes nodes that are not there, or the way or the duration makes no sense.
    """
    if way not in WAYS:
        raise UsageError(f"there is no way {way!r} to go on: known are {', '.join(WAYS)}")
    check_positive({"the duration": duration_s}, "time")
    run, free = _Run(job, way), 0.0
    for time_s, available in _counts(job.nodes, changes):
        if time_s >= duration_s:
            break
        free += (time_s - run.now) * job.rate(run.available)
        run.advance(time_s)
        run.change(available)
    free += (duration_s - run.now) * job.rate(run.available)
    run.advance(duration_s)
    return ElasticOutcome(
        way=way,
        samples=run.samples,
        throughput=run.samples / duration_s,
        goodput=run.samples / (job.rate(job.nodes) * duration_s),
        of_available=run.samples / free if free else 0.0,
        changes=run.changes,
        down_s=run.down_s,
    )


def _counts(nodes: int, changes: Sequence[Change]) -> list[tuple[float, int]]:
    """The number of nodes after each moment of change."""
    at: dict[float, int] = {}
    for change in sorted(changes):
        nodes += change.nodes
        at[change.time_s] = nodes
    for time_s, count in at.items():
        if count < 0:
            raise UsageError(f"at {time_s:g} s the trace takes {-count} nodes more than there are")
    return list(at.items())


class _Run:
    """One run. Invariant: ``used <= available``; nodes that are not used yet are the first to go."""

    def __init__(self, job: ElasticJob, way: str) -> None:
        self.job, self.way = job, way
        self.now, self.samples, self.down_s, self.changes = 0.0, 0.0, 0.0, 0
        self.available = self.used = job.nodes
        self._ready, self._since = 0.0, 0.0  # when training continues; samples since the last change
        self._grows_at = math.inf

    def change(self, available: int) -> None:
        """The number of nodes is another one from now on."""
        self.available = available
        if available < self.used:
            self._lose(available)
        self._grows_at = self.now + self.job.hold_s if self._target() > self.used else math.inf
        if self._grows_at <= self.now:
            self._grow()

    def advance(self, until: float) -> None:
        """Train until a time, and take in nodes that have stayed long enough."""
        while self._grows_at < until:
            self._train(max(self.now, self._grows_at))
            self._grow()
        self._train(until)

    def _target(self) -> int:
        """Nodes that the job would use of those that there are."""
        return min(self.available, max(max(self.job.throughput), self.job.nodes))

    def _rate(self) -> float:
        full = self.job.nodes
        if self.used >= full or self.way in ("elastic", "restart"):
            return self.job.rate(self.used)
        if self.way == "waiting" or not self.job.rate(self.used):
            return 0.0
        return self.job.rate(full) / math.ceil(full / self.used)  # some node does so many nodes' work

    def _train(self, until: float) -> None:
        begin, rate = min(max(self.now, self._ready), until), self._rate()
        done = (until - begin) * rate
        self.down_s += until - self.now if not rate else begin - self.now
        self.samples += done
        self._since += done
        self.now = until

    def _lose(self, available: int) -> None:
        """Lose the samples in progress, and begin again in another layout."""
        per_way = {"adoption": self.job.adopt_s, "restart": self.job.restart_s}
        behind = self.job.batch / 2
        if self.way == "restart":
            behind = self._rate() * self.job.checkpoint_interval_s / 2
        lost = min(behind, self._since)
        self.samples -= lost
        self._begin(available, per_way.get(self.way, self.job.change_s))

    def _grow(self) -> None:
        """Nodes are taken in; nothing is lost, since it is done between two steps."""
        stood_still = not self._rate()
        restarts = self.way == "restart" or (stood_still and self.way != "waiting")
        self._begin(self._target(), self.job.restart_s if restarts else self.job.grow_s)

    def _begin(self, used: int, seconds: float) -> None:
        self.used, self._since, self.changes = used, 0.0, self.changes + 1
        self._ready = self.now + seconds
        self._grows_at = math.inf
