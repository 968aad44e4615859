"""The memory that this host has, and has left, by its kernel and by this process's control groups."""

from __future__ import annotations

from pathlib import Path

from swift_ft.host.control_groups import GROUPS, PROC, memory_groups


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes that processes can still take; None if nothing says so.

    Args:
        proc: where the kernel tells of memory and processes.
        groups: where it tells of control groups.
    """
    left = (group.left_bytes for group in memory_groups(proc, groups))
    return _least(_of_host(proc / "meminfo", "MemAvailable:"), *left)


def most_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Bytes that processes can have in all, whatever others take now; None if nothing says so.

    Args:
        proc: where the kernel tells of memory and processes.
        groups: where it tells of control groups.
    """
    limits = (group.limit_bytes for group in memory_groups(proc, groups))
    return _least(_of_host(proc / "meminfo", "MemTotal:"), *limits)


def _least(*known: int | None) -> int | None:
    return min((one for one in known if one is not None), default=None)


def _of_host(meminfo: Path, fact: str) -> int | None:
    for line in meminfo.read_text().splitlines() if meminfo.exists() else ():
        if line.startswith(fact):
            return int(line.split()[1]) * 1024
    return None
