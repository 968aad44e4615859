"""Ends a process in which an operation takes longer than its group allows, unless that is switched off.

As NCCL's does in torch: it cannot know whether the tensors are still right. Whoever recovers switches it off.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from typing import Protocol

HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""The variable of torch for NCCL. It counts when a group is made; 0 switches the watchdog off."""

_LOOK_S = 0.05


class Watched(Protocol):
    """A group."""

    def overdue(self, now: float) -> bool:
        """Whether an operation takes too long."""


_lock = threading.Lock()
_groups: weakref.WeakSet[Watched] = weakref.WeakSet()
_of_process = 0


def watch(group: Watched) -> None:
    """Watch a group until it is destroyed."""
    global _of_process  # one thread for a process, and another one in a forked one
    if os.environ.get(HANDLING, "") == "0":
        return
    with _lock:
        _groups.add(group)
        if _of_process != os.getpid():
            _of_process = os.getpid()
            threading.Thread(target=_look, name="nccl-like watchdog", daemon=True).start()


def _look() -> None:
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            groups = list(_groups)
        if any(group.overdue(time.monotonic()) for group in groups):
            print("NCCL-like watchdog: an operation timed out, so this process ends", file=sys.stderr)
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGABRT)
        del groups
