"""CPU time, memory and traffic of a run at the steps of its recovery, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.usage import cpu_by_process, peak_bytes, reset_peak
from examples.commands import descendants
from swift_ft.cli.watch import View, Watch
from swift_ft.recovery.job_state import Phase

_ENTRY_S = 30.0
"""For so long it waits for an entry of the journal, without looking whether the run has ended otherwise."""
_END_S = 0.1
"""Between two looks whether all processes have ended."""


@dataclass(frozen=True)
class Reading:
    """By process, CPU seconds so far and the most memory since the last step; bytes through loopback."""

    cpu_s: dict[int, float]
    peak_bytes: dict[int, int]
    sent_bytes: int


class Meter:
    """Watches a run (:data:`examples.disturbed.Show`), and reads its use at the steps of the recovery.

    These are *detected*, *planned* (all have reported; loading and the replay follow), and *replayed*.
    """

    def __init__(self) -> None:
        self._readings: dict[str, Reading] = {}

    def __call__(self, watch: Watch, running: Callable[[], bool]) -> None:
        """Follow the journal until the run is over, and read at each step."""
        while running():
            if watch.over:
                time.sleep(_END_S)
                continue
            watch.poll(_ENTRY_S)  # to look often would take time of the processors that the run computes on
            if (step := self._next_step(watch.view)) is not None:
                pids = descendants(os.getpid())
                peaks = {pid: peak for pid in pids if (peak := _taken_peak_bytes(pid)) is not None}
                self._readings[step] = Reading(cpu_by_process(pids), peaks, _loopback_bytes())

    def _next_step(self, view: View) -> str | None:
        """The step that was taken since the last reading."""
        if "detected" not in self._readings:
            return "detected" if view.state.generation > 1 else None
        if "planned" not in self._readings:
            return "planned" if view.state.phase in (Phase.RECOVERING, Phase.LIVE) else None
        if "replayed" not in self._readings:
            return "replayed" if view.state.phase == Phase.LIVE else None
        return None

    def spent(self, since: str) -> dict[int, float]:
        """CPU seconds from a step to the end of the replay, by process."""
        before, after = self._readings[since].cpu_s, self._readings["replayed"].cpu_s
        return {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}

    def survivors_growth_bytes(self) -> int:
        """Of the process that grew most in the recovery: its peak then, less its peak in the training before.

        Pages of files that it has mapped count.
        """
        before = self._readings["detected"].peak_bytes
        later = [self._readings[step].peak_bytes for step in ("planned", "replayed")]
        grown = [
            max(reading.get(pid, 0) for reading in later) - peak
            for pid, peak in before.items()
            if all(pid in reading for reading in later)
        ]
        return max(grown)

    def sent_bytes(self, since: str) -> int:
        """Bytes from a step to the end of the replay."""
        return self._readings["replayed"].sent_bytes - self._readings[since].sent_bytes


def _taken_peak_bytes(pid: int) -> int | None:
    """The most memory of a process since the last call; None if it has ended."""
    with contextlib.suppress(OSError):
        peak = peak_bytes(pid)
        reset_peak(pid)
        return peak
    return None


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.lstrip().startswith("lo:"))
