"""The memory that this host has left, by its kernel and by the limit of its container."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that processes can still take; None if nothing says so.

    Args:
        meminfo: the kernel's account.
        cgroup: the folder of the container's limits (version 2, or version 1 in ``memory/``).
    """
    found = []
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for limit, used in (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory" / "memory.limit_in_bytes", cgroup / "memory" / "memory.usage_in_bytes"),
    ):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            cached = _cached_bytes(limit.with_name("memory.stat"))
            found.append(max(0, int(text) - int(used.read_text()) + cached))
    return min(found, default=None)


def _cached_bytes(stat: Path) -> int:
    """Bytes that the kernel gives back when they are needed: files that have not been used for a while."""
    if not stat.exists():
        return 0
    facts = dict(line.split() for line in stat.read_text().splitlines())
    return int(facts.get("inactive_file", facts.get("total_inactive_file", 0)))
