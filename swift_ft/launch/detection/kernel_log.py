"""The kernel's messages that explain a loss: a device, the memory, a link or a disk that reports an error."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection
from pathlib import Path

from swift_ft.config import detection_timings as timings
from swift_ft.recovery.causes import Cause

_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192
_MOST_RECORDS = 1000
"""In one look, where another program writes without end."""
_MOST = 3
_MOST_CHARACTERS = 200

_KNOWN = {
    Cause.DEVICE: re.compile(r"NVRM: Xid|NVRM: GPU .* fallen off|amdgpu.*(GPU reset|ring \S+ timeout)"),
    Cause.MACHINE: re.compile(r"\[Hardware Error\]|[Mm]achine check|hardware memory corruption"),
    Cause.MEMORY: re.compile(r"[Oo]ut of memory: Killed process"),
    Cause.NATIVE: re.compile(r"segfault at|general protection|trap invalid opcode|trap divide error"),
    Cause.NETWORK: re.compile(r"[Ll]ink (is )?[Dd]own|carrier lost|NETDEV WATCHDOG"),
    Cause.STORE: re.compile(r"I/O error|[Rr]emounting filesystem read-only|nfs: server \S+ not responding"),
}

_OF_PROCESSES = (Cause.MEMORY, Cause.NATIVE)
"""Such messages name a process. Those of other jobs' processes explain nothing here."""


class KernelLog:
    """The messages since it was made, of which some explain a loss. None where the log may not be read.

    May be used from any thread.

    Args:
        path: of the kernel's log, whose records are read one at a time.
    """

    def __init__(self, path: Path = _LOG) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, Cause, str]] = deque(maxlen=100)  # guarded by the lock
        self._file = -1
        with contextlib.suppress(OSError):  # in a container, as a rule
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def look(self) -> None:
        """Note what is new. Call it from time to time: the kernel keeps only so many messages."""
        with self._lock:
            for _ in range(_MOST_RECORDS if self._file >= 0 else 0):
                try:
                    record = os.read(self._file, _RECORD_BYTES)
                except BrokenPipeError:  # some were overwritten before they were read
                    continue
                except OSError:  # there are no more
                    return
                self._note(record.decode(errors="replace"))

    def _note(self, record: str) -> None:
        text = record.partition(";")[2].partition("\n")[0]
        for cause, known in _KNOWN.items():
            if known.search(text):
                self._recent.append((time.monotonic(), cause, text[:_MOST_CHARACTERS]))
                return

    def evidence(self, pid: int = 0, causes: Collection[Cause] = tuple(Cause)) -> tuple[str, ...]:
        """The newest messages of the last half minute that explain the end of a process.

        Args:
            pid: its number.
            causes: to which they point.
        """
        known = (f"[{pid}]", f"process {pid} ")
        found = [
            text
            for cause, text in self._lately()
            if cause in causes and (cause not in _OF_PROCESSES or any(name in text for name in known))
        ]
        return tuple(f"the kernel said: {text}" for text in found[-_MOST:])

    def hardware(self) -> Cause | None:
        """The device or the machine, where it has reported an error of its own lately; else None."""
        found = [cause for cause, _ in self._lately() if cause in (Cause.DEVICE, Cause.MACHINE)]
        return found[-1] if found else None

    def _lately(self) -> list[tuple[Cause, str]]:
        self.look()
        since = time.monotonic() - timings.KERNEL_MESSAGE_S
        with self._lock:
            return [(cause, text) for at, cause, text in self._recent if at >= since]

    def close(self) -> None:
        """Read no more."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
