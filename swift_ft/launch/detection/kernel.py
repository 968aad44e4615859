"""The kernel's word on processes here: their states, and how many it has ended for want of memory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from swift_ft.units import format_bytes

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
STOPPED_BY_SIGNAL = "T"
"""The kernel's letter for a process that a signal has stopped. A debugger's stop has another one."""

_STAT_BYTES = 4096  # the kernel's line is shorter


def process_state(pid: int) -> str:
    """The kernel's letter for a process's state: ``X`` if it is gone, empty if the system does not tell."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # asked often: a file object takes longer
    except OSError:
        return "X" if Path("/proc/self/stat").exists() else ""
    try:
        return os.read(descriptor, _STAT_BYTES).rpartition(b")")[2].split()[0].decode()
    except ProcessLookupError:  # it ended since
        return "X"
    finally:
        os.close(descriptor)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger, or gone. False if the system does not tell."""
    return process_state(pid) in {*"TtZX"}


class OomKills:
    """Counts the kernel's kills among the processes of this one's control group.

    Machines of one host that share a group share its count.

    Args:
        proc: where the kernel tells of processes.
        cgroups: where it tells of control groups (version 2, or version 1 in ``memory/``).
    """

    def __init__(self, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> None:
        self._counter, self._limit = _files(proc, cgroups)
        self._before = self._count()

    def look(self) -> str:
        """A message if the kernel has killed a process for memory since the last look; else empty."""
        before, self._before = self._before, self._count()
        if self._before <= before:
            return ""
        limit = _limit(self._limit)
        return "the kernel was out of memory" + ("" if limit is None else f", of which {limit} are allowed")

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in self._counter.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0


def _files(proc: Path, cgroups: Path) -> tuple[Path, Path]:
    """The file with the count, and the one with the limit. The host's own count where no group has one."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        # In a container, the path may be that of the host, and the folder be the container's.
        for place in (path.lstrip("/"), "."):
            if not controllers and (cgroups / place / "memory.events").exists():
                return cgroups / place / "memory.events", cgroups / place / "memory.max"
            if controllers == "memory" and (cgroups / "memory" / place / "memory.oom_control").exists():
                folder = cgroups / "memory" / place
                return folder / "memory.oom_control", folder / "memory.limit_in_bytes"
    return proc / "vmstat", proc / "none"


def _lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text().splitlines()
    return []


def _limit(path: Path) -> str | None:
    """The limit in words; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        limit = int(path.read_text())
        return format_bytes(limit) if limit < 2**60 else None
    return None
