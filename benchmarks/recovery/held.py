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
from swift_ft.testing.chaos.leftovers import processes_of

_THIN = 400
"""Most samples that a slope is taken of: all pairs of them are compared."""
_Z = 2.326
"""Of a normal distribution: 99 % lie below so many standard deviations above its mean."""
_OPENED_ONCE = 0.03
"""The jump that is allowed in any case, as a part of the median: a thread that is needed late."""
_LIVED = 0.9
"""Processes count that lived for so much of the time."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A straight line through samples.

    Attributes:
        median: of the samples.
        growth: of the line over the whole time, in units of the samples.
        at_least: the growth that is exceeded with a confidence of 99 %; below 0 nothing shows that it grows.
        jump: by so much at least, with the same confidence, samples of the last third lie above those of
            the first third. A straight line shows nothing of a single jump.
    """

    median: float
    growth: float
    at_least: float
    jump: float

    def is_flat(self, tolerated: float) -> bool:
        """Whether no growth of more than so much is shown.

        Args:
            tolerated: as a part of the median.
        """
        jump = max(tolerated, _OPENED_ONCE)
        return self.at_least <= tolerated * abs(self.median) and self.jump <= jump * abs(self.median)


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """The line of Theil and Sen: the median of the slopes between all pairs of samples.

    Its confidence bound is that of Sen (1968): the slope below which so few pairs lie as Kendall's S, which
    is normal with variance ``n (n - 1) (2 n + 5) / 18``, makes likely. The bound of a jump is that of Moses:
    the same for the differences of all pairs of two groups, and the statistic of Mann and Whitney.

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
    third = max(1, n // 3)
    jumps = np.sort((y[-third:, None] - y[None, :third]).ravel())
    least = int(max(0, np.floor(third**2 / 2 - _Z * np.sqrt(third**2 * (2 * third + 1) / 12))))
    return Trend(
        float(np.median(y)), float(np.median(slopes)) * over, float(slopes[lower]) * over, float(jumps[least])
    )


@dataclass(frozen=True, slots=True)
class Held:
    """One process at one time: memory of its own in KiB, descriptors and threads."""

    kib: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Files:
    """Files of a folder: how many, and bytes of all together."""

    count: int
    size: int


@dataclass
class HeldOverTime:
    """Samples of a run.

    Attributes:
        times: Unix seconds of the samples.
        processes: how many the run had, those that have lost their parents and those that are dead and not
            yet waited for, too.
        stored: logs and checkpoints in the store.
        history: files of runs in the store: the journal's archive, and what processes did in recoveries.
    """

    times: list[float] = field(default_factory=list)
    processes: list[int] = field(default_factory=list)
    stored: list[Files] = field(default_factory=list)
    history: list[Files] = field(default_factory=list)
    _by_process: dict[int, dict[int, Held]] = field(default_factory=lambda: defaultdict(dict))

    def sample(self, pid: int, store: Path, mark: Path | None = None) -> None:
        """Look at a run's processes, and at its store.

        Args:
            pid: of its first process.
            store: folder of the session's store.
            mark: by which its processes are known that are no longer below the first one; None: by nothing.
        """
        index = len(self.times)
        self.times.append(time.time())
        stored, history = _files(store)
        self.stored.append(stored)
        self.history.append(history)
        processes = {pid, *descendants(pid), *(processes_of(mark) if mark is not None else ())}
        self.processes.append(len(processes))
        for one in processes:
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


def _files(store: Path) -> tuple[Files, Files]:
    """Those of logs and checkpoints, and those of the history of runs, which is kept."""
    counts, sizes = [0, 0], [0, 0]
    for folder, _, files in os.walk(store):  # which does not mind what is deleted meanwhile
        of_runs = "runs" in Path(folder).relative_to(store).parts[:1]
        for name in files:
            with contextlib.suppress(OSError):
                sizes[of_runs] += (Path(folder) / name).stat().st_size
                counts[of_runs] += 1
    stored, history = map(Files, counts, sizes)
    return stored, history
