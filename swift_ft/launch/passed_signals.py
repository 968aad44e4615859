"""SIGUSR1 and SIGUSR2, which a scheduler sends to a launcher for its workers, such as before a time limit.

torchrun dies of them. Here they reach the workers whose scripts handle them, and else a line says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from swift_ft.launch.stop_signals import FOR_WORKERS, stop_signals

_logger = logging.getLogger(__name__)


class PassedSignals:
    """Notes these signals from now on, unless the user has them stop the launcher.

    Make it in the main thread. A handler only notes: what it interrupts may hold any lock.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        for number in {*FOR_WORKERS}.difference(stop_signals()):
            signal.signal(number, self._note)

    def fileno(self) -> int:
        """For a selector: readable when a signal has come."""
        return self._read

    def close_in_child(self) -> None:
        """In a process that has other things to do. It says by itself what the signals do there."""
        os.close(self._read)
        os.close(self._write)

    def pass_on(self, workers: Mapping[int, int], others: Iterable[int]) -> None:
        """Send on what has come since the last call.

        Args:
            workers: processes that run scripts, by rank.
            others: launchers that do the same, by process.
        """
        for number in self._noted():
            for pid in others:
                _send(pid, number)
            deaf = [rank for rank, pid in sorted(workers.items()) if not handles(pid, number)]
            for rank in workers.keys() - deaf:
                _send(workers[rank], number)
            if deaf or not workers:
                ranks = ", ".join(f"worker {rank}" for rank in deaf)
                why = f"the script of {ranks} does not handle it" if deaf else "no worker runs here now"
                _logger.warning(
                    "%s is ignored: %s",
                    number.name,
                    why,
                    extra={"event": "signal_ignored", "ranks": deaf},
                )

    def _note(self, number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # thousands of them wait there already
            os.write(self._write, bytes([number]))

    def _noted(self) -> list[signal.Signals]:
        try:
            return [signal.Signals(number) for number in os.read(self._read, 4096)]
        except BlockingIOError:
            return []


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal. False if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (number - 1) & 1)
    return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
