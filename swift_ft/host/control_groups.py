"""The control groups that this process is in, and what they allow and count of memory (versions 1 and 2)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Bytes. A group of version 1 without a limit says a number that no host has."""


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A group of processes whose memory the kernel counts together.

    Attributes:
        folder: where the kernel tells of it.
        unified: it is of version 2.
    """

    folder: Path
    unified: bool

    @property
    def limit_bytes(self) -> int | None:
        """The memory that its processes may have together; None without a limit."""
        limit = self._number("memory.max" if self.unified else "memory.limit_in_bytes")
        return limit if limit is not None and limit < _NO_LIMIT else None

    @property
    def left_bytes(self) -> int | None:
        """The memory that they may still take; None without a limit."""
        limit = self.limit_bytes
        used = self._number("memory.current" if self.unified else "memory.usage_in_bytes")
        if limit is None or used is None:
            return None
        # Given back when it is needed: files that have not been used for a while.
        cached = fact_in(
            self.folder / "memory.stat", "inactive_file" if self.unified else "total_inactive_file"
        )
        return max(0, limit - used + (cached or 0))

    @property
    def oom_kills(self) -> int | None:
        """The number of its processes that the kernel has ended for want of memory; None if unknown."""
        return fact_in(self.folder / ("memory.events" if self.unified else "memory.oom_control"), "oom_kill")

    @property
    def ends_together(self) -> bool:
        """Whether the kernel ends all of its processes where it ends one for want of memory."""
        return self.unified and self._number("memory.oom.group") == 1

    def _number(self, name: str) -> int | None:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            return int((self.folder / name).read_text())
        return None


def fact_in(file: Path, key: str) -> int | None:
    """The number beside a key in a file of the kernel's with a fact in each line; None if it is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            found, _, value = line.partition(" ")
            if found == key:
                return int(value)
    return None


def memory_groups(proc: Path = PROC, groups: Path = GROUPS) -> list[MemoryGroup]:
    """The process's own group, and those around it, as far as they are visible here.

    Args:
        proc: where the kernel tells of processes.
        groups: where it tells of control groups.
    """
    found = []
    for controllers, path in _own_groups(proc):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = groups / "memory" if controllers else groups
        # In a container, the path may be that of the host, and the folder be the container's.
        own = PurePosixPath(path.lstrip("/"))
        folders = [root / place for place in (own, *own.parents)]
        marker = "memory.limit_in_bytes" if controllers else "memory.max"
        found += [MemoryGroup(f, not controllers) for f in dict.fromkeys(folders) if (f / marker).exists()]
    return found


def _own_groups(proc: Path) -> list[tuple[str, str]]:
    """Controllers and path of each group; those of a container where nothing is said."""
    with contextlib.suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        return [(controllers, path) for _, controllers, path in (line.split(":", 2) for line in lines)]
    return [("", "/"), ("memory", "/")]
