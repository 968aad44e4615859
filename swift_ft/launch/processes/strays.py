"""Processes that a worker has started, and that have lost it: they keep its ports, its memory, its GPU.

The kernel gives a process whose parent has died to the nearest ancestor that wants it. The standby does, so
whatever a dead worker leaves behind becomes the standby's child, in whatever session or group it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from swift_ft.host.outside import OUTSIDE

_logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36
_GONE_S = 2.0
"""The kernel takes longer only for a process that waits for a disk or a device."""
_POLL_S = 0.001

_CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager", OUTSIDE.encode())
"""They outlive their worker to remove the shared memory that it has left, or to end a fault, and end then."""


def adopt_orphans() -> None:
    """From now on, orphans among this process's descendants become its children. Linux only."""
    with contextlib.suppress(OSError, AttributeError):  # another kernel: they go to its first process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_strays(known: Collection[int]) -> None:
    """Kill all children of this process but those that it knows, and what they leave behind.

    Args:
        known: pids of children that stay.
    """
    deadline = time.monotonic() + _GONE_S
    while strays := [pid for pid in _children() if pid not in known and not _is_cleaner(pid)]:
        if time.monotonic() > deadline:
            _logger.warning(
                "processes %s of a worker that has ended do not end, not even by SIGKILL",
                ", ".join(map(str, strays)),
                extra={"event": "strays_stay"},
            )
            return
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """Pids of this process's children. It has one thread."""
    pid = os.getpid()
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _parent(entry) == pid]


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended
        return 0


def _is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in command for name in _CLEANERS)
