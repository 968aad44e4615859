"""What the processes of a run hold, over time, and whether that grows: a slope with its confidence bound."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from examples.commands import descendants

_THIN = 400
"""Most samples that a slope is taken of: all pairs of them are compared."""
_Z = 2.326
"""Of a normal distribution: 99 % lie below so many standard deviations above its mean."""
_LIVED = 0.9
"""Processes count that lived for so much of the time."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through samples.

    Attributes:
        median: of the samples.
        growth: of the line over the whole time, in units of the samples.
        at_least: the growth that is exceeded with a confidence of 99 %; below 0 nothing shows that it grows.
    """

    median: float
    growth: float
    at_least: float

    def is_flat(self, tolerated: float) -> bool:
        """Whether no growth of more than so much is shown.

        Args:
            tolerated: as a part of the median.
        """
        return self.at_least <= tolerated * abs(self.median)


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """The line of Theil and Sen: the median of the slopes between all pairs of samples.

    Its confidence bound is that of Sen (1968): the slope below which so few pairs lie as Kendall's S, which
    is normal with variance ``n (n - 1) (2 n + 5) / 18``, makes likely.

    Args:
        times: seconds, ascending.
        values: as many.
    """
    stride = -(-len(times) // _THIN)
    x, y = np.asarray(times[::stride]), np.asarray(values[::stride], dtype=float)
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    n = len(x)
    spread = _Z * np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lower = int(max(0, np.floor((len(slopes) - spread) / 2)))
    over = float(x[-1] - x[0])
    return Trend(float(np.median(y)), float(np.median(slopes)) * over, float(slopes[lower]) * over)


@dataclass(frozen=True, slots=True)
class Held:
    """One process at one time: memory of its own in KiB, descriptors and threads."""

    kib: int
    descriptors: int
    threads: int


@dataclass
class HeldOverTime:
    """Samples of a run.

    Attributes:
        times: monotonic seconds of the samples.
        files: of logs and checkpoints in the store at these times.
    """

    times: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    _by_process: dict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))

    def sample(self, pid: int, store: Path) -> None:
        """Look at a run's processes, and at its store.

        Args:
            pid: of its first process.
            store: folder of the session's store.
        """
        index = len(self.times)
        self.times.append(time.monotonic())
        self.files.append(_files(store))
        for one in [pid, *descendants(pid)]:
            if (held := _held(one)) is not None:
                self._by_process[one][index] = held

    def of_survivors(self, of: Callable[[Held], int], skipped: float) -> tuple[list[float], list[float]]:
        """Times, and what all processes together hold that lived from the first skipped sample to the last.

        Args:
            of: what to add up.
            skipped: the part of the samples at the beginning that does not count.
        """
        begin = int(len(self.times) * skipped)
        indices = range(begin, len(self.times))
        lived = [
            held
            for held in self._by_process.values()
            if sum(index in held for index in indices) >= _LIVED * len(indices)
        ]
        whole = [index for index in indices if all(index in held for held in lived)]
        sums = [float(sum(of(held[index]) for held in lived)) for index in whole]
        return [self.times[index] for index in whole], sums


def _held(pid: int) -> Held | None:
    """None if the process is gone."""
    place = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError, KeyError):
        fields = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
        return Held(
            int(fields["RssAnon"].split()[0]),
            sum(1 for _ in (place / "fd").iterdir()),
            int(fields["Threads"]),
        )
    return None


def _files(store: Path) -> int:
    """Files of logs and checkpoints: the history of runs is kept."""
    count = 0
    for folder, _, files in os.walk(store):  # which does not mind what is deleted meanwhile
        if "runs" not in Path(folder).relative_to(store).parts[:1]:
            count += len(files)
    return count
