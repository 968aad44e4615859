"""The kernel's messages that explain a loss: a device, the memory, a link or a disk that reports an error."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from swift_ft.config import detection_timings as timings
from swift_ft.host.accelerators import accelerators_seen
from swift_ft.recovery.causes import Cause

_LOG = Path("/dev/kmsg")
_NAMESPACE = Path("/proc/self/ns/pid")
_FIRST_NAMESPACE = 0xEFFFFFFC
"""The inode of the namespace of processes whose numbers the kernel writes (PROC_PID_INIT_INO)."""
_RECORD_BYTES = 8192
_MOST_RECORDS = 1000
"""In one look, where another program writes without end."""
_MOST = 3
_MOST_CHARACTERS = 200

_KNOWN = {
    Cause.DEVICE: re.compile(r"NVRM: Xid|NVRM: GPU .* fallen off|amdgpu.*(GPU reset|ring \S+ timeout)"),
    Cause.MACHINE: re.compile(r"\[Hardware Error\]|[Mm]achine check|hardware memory corruption"),
    Cause.MEMORY: re.compile(r"[Oo]ut of memory( \(\w+\))?: Kill(ed)? process"),  # "Kill" up to Linux 5.0
    Cause.NATIVE: re.compile(r"segfault at|general protection|trap invalid opcode|trap divide error"),
    Cause.NETWORK: re.compile(r"[Ll]ink (is )?[Dd]own|carrier lost|NETDEV WATCHDOG"),
    Cause.STORE: re.compile(r"I/O error|[Rr]emounting filesystem read-only|nfs: server \S+ not responding"),
}

_OF_PROCESSES = (Cause.MEMORY, Cause.NATIVE)
"""Such messages name a process. Those of other jobs' processes explain nothing here."""

_CORRECTED = re.compile(r"Machine check events logged|\b[Cc]orrected\b|no (further )?action required")
"""Such errors are normal, and end nothing."""
_UNCORRECTED = re.compile(
    r"Machine Check Exception|hardware memory corruption|[Uu]ncorrected|severity: (fatal|recoverable)"
)
"""Its other lines on an error are the same whether it was corrected or not."""

_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_OF_PROGRAM = frozenset({13, 31, 43, 45})
"""Xids of what a program does to its own context, or of what its end leaves behind."""
_FATAL = frozenset({48, 61, 62, 64, 74, 79, 94, 95, 109, 110, 119, 120, 140})
"""Xids after which a device, or what ran on it, does not go on: its driver may end processes for them."""

_ADDRESS = re.compile(r"\b([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\b")
"""Of a device on the PCI bus: its domain, bus and number."""
_PROCESS = re.compile(r"\bpid=(\d+)|:(\d+) due to|\w\[(\d+)\]|[Pp]rocess (\d+) ")


class KernelLog:
    """The messages since it was made, of which some explain a loss. None where the log may not be read.

    A container has numbers of its own for its processes: those in the messages tell it nothing. There only
    those messages count that name no process, and those of a device that it sees. Others may be another
    container's.

    May be used from any thread.

    Args:
        path: of the kernel's log, whose records are read one at a time.
        same_numbers: whether this machine's processes have the kernel's own numbers; None to find that out.
        devices: PCI addresses of the accelerators that are seen here; None to find them.
    """

    def __init__(
        self,
        path: Path = _LOG,
        same_numbers: bool | None = None,
        devices: Iterable[str] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, Cause, str]] = deque(maxlen=100)  # guarded by the lock
        self._threads: dict[int, frozenset[int]] = {}  # by process; replaced as a whole
        self._threads_due_at = -math.inf  # owner: the thread that says which processes run
        self._same_numbers = _is_first() if same_numbers is None else same_numbers
        if devices is None:  # found once: a driver whose device is gone may not answer any more
            devices = () if self._same_numbers else accelerators_seen()
        self._devices = {*map(_device_in, devices)}
        self._file = -1
        with contextlib.suppress(OSError):  # in a container, as a rule
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)

    def look(self, pids: Collection[int] | None = None, ended: Collection[int] = ()) -> None:
        """Note what is new. Call it from time to time: the kernel keeps only so many messages.

        Args:
            pids: the processes here, as they may be asked for later; None for those known already.
            ended: those of them that do not run any more. Others may have their numbers by now.
        """
        if pids is not None and self._file >= 0 and self._same_numbers:
            self._note_threads(pids, ended)
        with self._lock:
            for _ in range(_MOST_RECORDS if self._file >= 0 else 0):
                try:
                    record = os.read(self._file, _RECORD_BYTES)
                except BrokenPipeError:  # some were overwritten before they were read
                    continue
                except OSError:  # there are no more
                    return
                self._note(record.decode(errors="replace"))

    def _note_threads(self, pids: Collection[int], ended: Collection[int]) -> None:
        """Note the threads of processes: the kernel names a thread by its number, and not its process."""
        now, before = time.monotonic(), self._threads
        if now < self._threads_due_at and before.keys() == {*pids}:
            return
        self._threads_due_at = now + timings.THREADS_S
        running = {pid: _threads_of(pid) for pid in pids if pid not in ended}
        self._threads = {pid: running.get(pid) or before.get(pid, frozenset()) for pid in pids}

    def _note(self, record: str) -> None:
        text = record.partition(";")[2].partition("\n")[0]
        if _CORRECTED.search(text):
            return
        for cause, known in _KNOWN.items():
            if known.search(text) and self._may_be_ours(cause, text):
                self._recent.append((time.monotonic(), cause, text[:_MOST_CHARACTERS]))
                return

    def _may_be_ours(self, cause: Cause, text: str) -> bool:
        """Whether a message tells of this machine, and not of another container on the same host."""
        if self._same_numbers:
            return True
        if _is_of_one(cause, text):
            return False
        if cause == Cause.DEVICE and (device := _device_in(text)) is not None:
            return device in self._devices
        return not _process_in(text)  # a process here may have met it, or one elsewhere

    def evidence(self, pid: int = 0, causes: Collection[Cause] = tuple(Cause)) -> tuple[str, ...]:
        """The newest messages of the last half minute that explain the end of a process.

        Args:
            pid: its number.
            causes: to which they point.
        """
        found = [
            text
            for cause, text in self._lately()
            if cause in causes and not (_is_of_one(cause, text) and self._is_of_another(text, pid))
        ]
        return tuple(f"the kernel said: {text}" for text in found[-_MOST:])

    def may_have_killed(self, pid: int) -> bool:
        """Whether the kernel has ended a process for want of memory. True if that is not known.

        Args:
            pid: its number; 0 if it is not known.
        """
        if not pid or self._file < 0 or not self._same_numbers:
            return True
        return bool(self.evidence(pid, [Cause.MEMORY]))

    def hardware(self, pid: int, cause: Cause) -> Cause:
        """The cause of the end of a process by a signal: the device or the machine, where that shows.

        Args:
            pid: its number; 0 if it is not known.
            cause: by the signal. One from outside comes of a device only if that is lost for good.
        """
        for blamed, text in reversed(self._lately()):
            if pid and _process_in(text) and self._is_of_another(text, pid):
                continue
            if cause == Cause.NATIVE and _is_error(blamed, text):
                return blamed
            if cause == Cause.SIGNAL and _is_fatal(blamed, text):
                return blamed
        return cause

    def _is_of_another(self, text: str, pid: int) -> bool:
        """Whether a message is neither of a process nor of a thread of it. False if that is not known."""
        named = _process_in(text)
        return self._same_numbers and named != pid and named not in self._threads.get(pid, ())

    def forget(self) -> None:
        """Let what was said explain no later failure. A link alone may be why several machines are lost."""
        with self._lock:
            kept = [message for message in self._recent if message[1] == Cause.NETWORK]
            self._recent.clear()
            self._recent.extend(kept)

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


def _is_first() -> bool:
    """Whether this process is in the first namespace."""
    try:
        return _NAMESPACE.stat().st_ino == _FIRST_NAMESPACE
    except OSError:
        return True


def _threads_of(pid: int) -> frozenset[int]:
    """The numbers of a process's threads; none if it is gone."""
    try:
        with os.scandir(f"/proc/{pid}/task") as tasks:  # paths would take longer
            return frozenset(int(task.name) for task in tasks)
    except OSError:
        return frozenset()


def _is_of_one(cause: Cause, text: str) -> bool:
    """Whether a message is of the process that it names alone."""
    return cause in _OF_PROCESSES or _xid_in(text) in _OF_PROGRAM


def _is_error(cause: Cause, text: str) -> bool:
    """Whether a message is of an error of the device's or the machine's own."""
    if cause == Cause.MACHINE:
        return _UNCORRECTED.search(text) is not None
    return cause == Cause.DEVICE and _xid_in(text) not in _OF_PROGRAM


def _is_fatal(cause: Cause, text: str) -> bool:
    """Whether a process that uses the device, or the memory, is ended for a message's error."""
    if cause == Cause.MACHINE:
        return "hardware memory corruption" in text
    return cause == Cause.DEVICE and (_xid_in(text) in _FATAL or "fallen off" in text)


def _xid_in(text: str) -> int:
    """The number of the error of NVIDIA's driver; 0 if it is none."""
    found = _XID.search(text)
    return int(found[1]) if found else 0


def _device_in(text: str) -> tuple[int, ...] | None:
    """The address of the device that a message names; None if it names none."""
    found = _ADDRESS.search(text)
    return tuple(int(part, 16) for part in found.groups()) if found else None


def _process_in(text: str) -> int:
    """The process that a message names; 0 if it names none."""
    found = _PROCESS.search(text)
    return int(next(filter(None, found.groups()))) if found else 0
