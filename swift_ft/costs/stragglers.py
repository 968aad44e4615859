"""Detection of workers whose own work takes persistently longer than that of their peers. Pure.

A worker tells the median of its last iterations, without the time in which it waited for others. That is
compared with what the same work is expected to take, and the result with that of its peers: if all become
slower, by longer sequences say, none of them is a straggler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import median, median_low

_JUDGEMENTS = 3
"""In a row that have to agree, at least."""
_APART = 3
"""Iterations between two of them."""
_LASTS_S = 3.0
"""Between the first and the last one, at least: where iterations are short, other processes take a core for
many of them now and then."""
_MATTERS = 0.05
"""The share of an iteration by which a straggler's own work is longer, at least: where it takes next to no
time, noise is a multiple of it."""
_CHANGE = 0.2
"""A straggler's pace is told again when it has changed by this share."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A worker's note about its own work.

    Attributes:
        iteration: iterations that it has completed.
        own_s: seconds of an iteration in which it did not wait: the median of the last few.
        step_s: seconds of an iteration, likewise.
    """

    iteration: int
    own_s: float
    step_s: float


@dataclass(slots=True)
class _Record:
    iteration: int = 0
    at_s: deque[float] = field(default_factory=deque)
    recent: deque[float] = field(default_factory=deque)

    def add(self, at_s: float, pace: float) -> None:
        """One more judgement; those that are not needed any more are forgotten."""
        self.at_s.append(at_s)
        self.recent.append(pace)
        while len(self.recent) > _JUDGEMENTS and at_s - self.at_s[1] >= _LASTS_S:
            self.at_s.popleft()
            self.recent.popleft()

    @property
    def is_enough(self) -> bool:
        """Whether the judgements say something, if they agree."""
        return len(self.recent) >= _JUDGEMENTS and self.at_s[-1] - self.at_s[0] >= _LASTS_S


class Stragglers:
    """Judges again and again, and says what has changed.

    Args:
        factor: a worker that takes at least so many times as long as its peers is a straggler. Hysteresis:
            below 1 + (factor - 1) / 2 it no longer is.
    """

    def __init__(self, factor: float) -> None:
        self._enters, self._leaves = factor, 1 + (factor - 1) / 2
        self._records: dict[int, _Record] = {}

    def forget(self) -> None:
        """After a recovery: workers were rebuilt, or stood still."""
        self._records.clear()

    def judge(
        self,
        samples: Mapping[int, Sample],
        expected_s: Mapping[int, float],
        slow: Mapping[int, int],
        now_s: float,
    ) -> dict[int, int]:
        """The paces to be noted, by rank, in thousandths; 1000 for who is a straggler no more.

        Args:
            samples: the newest of each worker.
            expected_s: what the work of each takes on equal devices, by rank; those without are left out.
            slow: the paces that are noted, by rank.
            now_s: the time, of any clock that never goes back.
        """
        ranks = [rank for rank in expected_s if rank in samples and expected_s[rank] > 0]
        if len(ranks) < 2:
            return {}
        takes = {rank: samples[rank].own_s / expected_s[rank] for rank in ranks}
        peers = median_low(takes.values())
        if peers <= 0:
            return {}
        found = {}
        for rank in ranks:
            record = self._records.setdefault(rank, _Record(samples[rank].iteration - _APART))
            if samples[rank].iteration < record.iteration + _APART:
                continue
            record.iteration = samples[rank].iteration
            more_s = samples[rank].own_s - peers * expected_s[rank]
            matters = more_s >= _MATTERS * samples[rank].step_s
            record.add(now_s, takes[rank] / peers if matters else min(takes[rank] / peers, 1.0))
            if (pace := self._pace(record, slow.get(rank, 1000))) is not None:
                found[rank] = pace
        return found

    def _pace(self, record: _Record, noted: int) -> int | None:
        """The pace to note for a worker; None if it is noted already."""
        if not record.is_enough:
            return None
        pace = round(1000 * median(islice(reversed(record.recent), _JUDGEMENTS)))
        if noted <= 1000:
            return pace if min(record.recent) >= self._enters else None
        if max(record.recent) <= self._leaves:
            return 1000
        changed = abs(pace - noted) > _CHANGE * noted
        return pace if changed and min(record.recent) >= self._enters else None


def least_of_peers(took: Mapping[int, float], holds: Mapping[int, Hashable]) -> dict[int, float]:
    """Seconds that each worker's work takes: the lower median over those that hold the same.

    Args:
        took: the least that each worker has taken so far, by rank.
        holds: what each has of the model; workers that hold the same are as quick as the faster half of them.
    """
    by_holds: dict[Hashable, list[float]] = {}
    for rank, seconds in took.items():
        by_holds.setdefault(holds[rank], []).append(seconds)
    return {rank: median_low(by_holds[holds[rank]]) for rank in took}
