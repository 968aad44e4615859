"""Injected kills and a trace of events: what the benchmarks need in ``train_plain.py``."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import nn


class Trace:
    """Appends a JSON line per event to a file that all workers share: iteration, rank, at (Unix time), event.

    The events are ``start`` (of the process: before Python's own start and all imports), ``joined`` (it can
    talk to the others), ``loaded`` (ready to train, with the first iteration to run), ``finished`` (an
    iteration), ``checkpoint`` (committed, with the last iteration in it) and ``kill``.

    Args:
        path: the file, or None to write nothing.
        rank: of this worker.
    """

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = Path(path) if path else None
        self._rank = rank
        self("start", at=process_start())

    def __call__(self, event: str, iteration: int | None = None, at: float | None = None) -> None:
        """Writes one event, of now if ``at`` does not say otherwise."""
        if self._path is None:
            return
        line = {"iteration": iteration, "rank": self._rank, "at": at or time.time(), "event": event}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def kill_in_forward(module: nn.Module, iteration: int, microbatch: int, marker: Path, trace: Trace) -> None:
    """Arms a SIGKILL of this process in the iteration that begins now: in the forward of one microbatch.

    Happens once: ``marker`` is written first, and where it exists nothing is armed. In the first iteration of
    a process, the schedule's shape inference counts as one more microbatch (they count from 0).
    """
    if marker.exists():
        return
    forwards = 0

    def kill_when_due(*_: Any) -> None:
        nonlocal forwards
        if forwards == microbatch:
            marker.touch()
            trace("kill", iteration)
            os.kill(os.getpid(), signal.SIGKILL)
        forwards += 1

    module.register_forward_pre_hook(kill_when_due)


def process_start() -> float:
    """Returns when the system started this process, in Unix time; without a ``/proc``, the time now."""
    try:
        stat = Path("/proc/self/stat").read_text()
    except OSError:
        return time.time()
    ticks_since_boot = int(stat.rpartition(")")[2].split()[19])
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted_at + ticks_since_boot / os.sysconf("SC_CLK_TCK")
