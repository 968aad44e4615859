"""The kernel's word on processes here: their states, and how many it has ended for want of memory."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path

from swift_ft.config import detection_timings as timings
from swift_ft.host.control_groups import GROUPS, PROC, fact_in, memory_groups
from swift_ft.units import format_bytes

_logger = logging.getLogger(__name__)

STOPPED_BY_SIGNAL = "T"
"""The kernel's letter for a process that a signal has stopped. A debugger's stop has another one."""

WAITS_IN_KERNEL = "D"
"""The letter for one that waits for a disk, a mount or a driver, and that no signal reaches."""

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

    Machines of one host that share a group share its count. Where no group has one, that of the host counts,
    which other jobs share.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.
    """

    def __init__(self, proc: Path = PROC, groups: Path = GROUPS) -> None:
        self._group = next((g for g in memory_groups(proc, groups) if g.oom_kills is not None), None)
        self._host = proc / "vmstat"
        self._before = self._count()
        self._seen_at = -math.inf

    def look(self) -> None:
        """Note what is new. Call it from time to time: a worker's later end has another reason."""
        before, self._before = self._before, self._count()
        if self._before > before:
            self._seen_at = time.monotonic()

    def why(self, *, killed: bool) -> str:
        """A message if the kernel has ended a process for memory just now; else empty.

        Args:
            killed: that process may be the one that has ended. Else the host's count tells nothing of it.
        """
        self.look()
        if time.monotonic() - self._seen_at > timings.OOM_KILL_S or (self._group is None and not killed):
            return ""
        limit = self._group.limit_bytes if self._group is not None else None
        allowed = "" if limit is None else f", of which {format_bytes(limit)} are allowed"
        return f"the kernel was out of memory{allowed}"

    def _count(self) -> int:
        count = fact_in(self._host, "oom_kill") if self._group is None else self._group.oom_kills
        return count or 0


def warn_if_ended_together(proc: Path = PROC, groups: Path = GROUPS) -> None:
    """Say, at the start, that a worker without memory takes this launcher with it, which could tell why."""
    if any(group.ends_together for group in memory_groups(proc, groups)):
        _logger.warning(
            "where a process here has no memory left the kernel ends all of them, and the others see a lost "
            "machine and no cause (memory.oom.group is 1): set singleProcessOOMKill in the kubelet's "
            "configuration, or OOMPolicy=continue in a unit of systemd",
            extra={"event": "ended_together"},
        )
