"""CPU time and memory of processes, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from examples.commands import descendants


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and all below it have used so far."""
    return sum(cpu_by_process([pid, *descendants(pid)]).values())


def cpu_by_process(pids: Sequence[int]) -> dict[int, float]:
    """CPU seconds that each process has used so far; those that have ended are left out."""
    seconds: dict[int, float] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            seconds[pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


def peak_bytes(pid: int) -> int:
    """Most memory that a process has had resident, since :func:`reset_peak` if that was called.

    Raises:
        OSError: if it has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


def reset_peak(pid: int) -> None:
    """From now on, the peak is counted from what the process uses now. Raises OSError if it has ended."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
