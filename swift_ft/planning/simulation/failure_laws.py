"""Failures of machines: random laws, and traces of real failures."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swift_ft.errors import UsageError
from swift_ft.planning.checks import check_positive

Failure = tuple[float, int]  # seconds, machine


class FailureLaw(Protocol):
    """A random law of failures.

    Attributes:
        on_work: times count seconds of completed training, not of the wall clock, so no failure falls into a
            recovery.
    """

    @property
    def on_work(self) -> bool:
        """See above."""
        ...

    def draw(self, machines: int, work_s: float, rng: np.random.Generator) -> Iterator[Failure]:
        """Failures in order of time, drawn lazily."""
        ...

    def rate(self, machines: int, work_s: float) -> float:
        """Mean failures per second over all machines."""
        ...


@dataclass(frozen=True)
class UniformCount:
    """A fixed number of failures, uniformly spread over the training done (§7.3)."""

    count: int
    on_work: bool = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UsageError("the number of failures must not be negative")

    def draw(self, machines: int, work_s: float, rng: np.random.Generator) -> Iterator[Failure]:
        """``count`` failures, then no more."""
        times = np.sort(rng.uniform(0.0, work_s, self.count))
        return iter(list(zip(times.tolist(), rng.integers(0, machines, self.count).tolist(), strict=True)))

    def rate(self, machines: int, work_s: float) -> float:
        """The count over the training time."""
        return self.count / work_s


@dataclass(frozen=True)
class Exponential:
    """Machines that fail independently of each other and of their age."""

    mtbf_s: float  # of one machine
    on_work: bool = False

    def __post_init__(self) -> None:
        check_positive({"the mean time between failures": self.mtbf_s})

    def draw(self, machines: int, work_s: float, rng: np.random.Generator) -> Iterator[Failure]:
        """Failures without end."""
        now = 0.0
        while True:
            gaps = rng.exponential(self.mtbf_s / machines, 256).tolist()
            for gap, machine in zip(gaps, rng.integers(0, machines, 256).tolist(), strict=True):
                now += gap
                yield now, machine

    def rate(self, machines: int, work_s: float) -> float:
        """Machines over the mean time of one."""
        return machines / self.mtbf_s


@dataclass(frozen=True)
class Weibull:
    """Machines whose failures depend on their age: a shape below 1 for early deaths, above 1 for wear.

    A machine that failed is replaced by one of age zero. All machines are new at the start.
    """

    mtbf_s: float
    shape: float
    on_work: bool = False

    def __post_init__(self) -> None:
        check_positive({"the mean time between failures": self.mtbf_s, "the shape": self.shape})

    def draw(self, machines: int, work_s: float, rng: np.random.Generator) -> Iterator[Failure]:
        """Failures without end."""
        scale = self.mtbf_s / math.gamma(1 + 1 / self.shape)
        ages = (scale * rng.weibull(self.shape, machines)).tolist()
        heap = [(age, machine) for machine, age in enumerate(ages)]
        heapq.heapify(heap)
        while True:
            now, machine = heap[0]
            yield now, machine
            heapq.heapreplace(heap, (now + scale * float(rng.weibull(self.shape)), machine))

    def rate(self, machines: int, work_s: float) -> float:
        """Long-run failures per second; new machines fail at another rate at first."""
        return machines / self.mtbf_s


@dataclass(frozen=True)
class Trace:
    """Recorded failures: (seconds from the start, machine), in order of time."""

    failures: tuple[Failure, ...]
    on_work: bool = False

    def draw(self, machines: int, work_s: float, rng: np.random.Generator) -> Iterator[Failure]:
        """The trace, then no more.

        Raises:
            UsageError: for a machine that the cluster does not have.
        """
        for _, machine in self.failures:
            if not 0 <= machine < machines:
                raise UsageError(f"the trace names machine {machine}, but there are {machines}: count from 0")
        return iter(self.failures)

    def rate(self, machines: int, work_s: float) -> float:
        """Failures of the trace over the training time."""
        return sum(time_s <= work_s for time_s, _ in self.failures) / work_s


class Stream:
    """One sample of a law, stored so that all strategies meet the same failures."""

    def __init__(self, source: Iterator[Failure]) -> None:
        self._source, self._seen = source, list[Failure]()

    def get(self, index: int) -> Failure:
        """The failure with that index; one at infinity where there are no more."""
        while len(self._seen) <= index:
            self._seen.append(next(self._source, (math.inf, 0)))
        return self._seen[index]

    @property
    def seen(self) -> Sequence[Failure]:
        """The failures drawn so far."""
        return self._seen
