"""The signals that come to a launcher: those that ask it to stop, and those for its workers.

Those that ask it to stop are an exception in its main thread. torchelastic handles them the same way, but
only from the first start of workers on. Which ones they are is said by torchrun's ``--signals-to-handle``,
and kept where torchelastic looks for it, too.

SIGUSR1 and SIGUSR2 are sent by a scheduler to a launcher for its workers, such as before a time limit.
torchrun dies of them. Here they reach the workers whose scripts handle them, and else a line says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException

from swift_ft.errors import UsageError

__all__ = [
    "FOR_WORKERS",
    "PassedSignals",
    "SignalException",
    "choose_stop_signals",
    "default_stop_signals",
    "ending_with_a_line",
    "handles",
    "ignore_stop_signals",
    "leave_to_the_launcher",
    "raise_stop_signals",
    "signal_of_end",
    "stop_signals",
    "stopped_by",
    "undo_ignoring",
]

FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that schedulers send to a launcher for its workers (:class:`PassedSignals`)."""

_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_NOT_TO_BE_HANDLED = {signal.SIGKILL, signal.SIGSTOP}

_logger = logging.getLogger(__name__)


def choose_stop_signals(names: str) -> None:
    """From now on these signals ask this process, and those that it forks, to stop.

    Args:
        names: as for ``--signals-to-handle``, with commas in between.

    Raises:
        UsageError: if one of them cannot be handled.
    """
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: {name!r} is no signal; write them as in {_DEFAULT}.")
        if signal.Signals[name] in _NOT_TO_BE_HANDLED:
            raise UsageError(f"--signals-to-handle: no process can handle {name}: leave it out.")
    os.environ[_VARIABLE] = ",".join(chosen)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to stop."""
    return tuple(signal.Signals[name] for name in os.environ.get(_VARIABLE, _DEFAULT).split(","))


def raise_stop_signals() -> None:
    """From now on each of the signals raises a :class:`SignalException` in the main thread."""
    for number in stop_signals():
        signal.signal(number, _raise)


def ignore_stop_signals() -> None:
    """From now on the launcher cleans up undisturbed. Only another Ctrl-C ends it, at once."""
    for number in {*stop_signals(), *FOR_WORKERS}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))


def default_stop_signals() -> None:
    """From now on the signals end this process at once, even while it waits in C++."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def ending_with_a_line() -> Iterator[None]:
    """Within the block a stop signal ends this process at once, with a line: also while it waits in C++.

    The main thread runs no handler there, so another thread reads the signals. After the block they do what
    they did before.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(reading, 1)[0]:
            if number in stop_signals():
                os.write(2, f"swift-run: {stopped_by(number)}\n".encode())
                os._exit(128 + number)

    thread = threading.Thread(target=watch, name="swift-stop-signals", daemon=True)
    thread.start()
    # Not before that thread reads: a signal that comes between the two would be lost.
    handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():  # before the thread goes: none is lost in between
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")  # processes that were forked meanwhile hold it open
        thread.join()
        os.close(writing)
        os.close(reading)


def leave_to_the_launcher() -> dict[signal.Signals, object]:
    """In a process that a launcher decides about: ignore what a scheduler sends to all of them.

    Returns:
        What was done about each of these signals before, for :func:`undo_ignoring`.
    """
    default = [signal.Signals[name] for name in _DEFAULT.split(",")]
    return {
        number: signal.signal(number, signal.SIG_IGN) for number in {*default, *stop_signals(), *FOR_WORKERS}
    }


def undo_ignoring(before: Mapping[signal.Signals, object]) -> None:
    """For a worker: what the user's shell has ignored is still ignored, and nothing else."""
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else signal.SIG_DFL)


def stopped_by(number: int) -> str:
    """The reason of an end by a signal: ``stopped by SIGTERM``."""
    return f"stopped by {signal.Signals(number).name}"


def signal_of_end(reason: str, exit_code: int) -> signal.Signals:
    """The signal that workers get when the run ends: the one that has ended it, else SIGTERM."""
    for number in signal.Signals:
        if exit_code == 128 + number and reason == stopped_by(number):
            return number
    return signal.SIGTERM


def _raise(number: int, _frame: object) -> NoReturn:
    name = signal.Signals(number)
    raise SignalException(f"stopped by {name.name}", sigval=name)


# ------------------------------------------------------------------------------------------- for the workers


class PassedSignals:
    """Notes signals for the workers from now on, unless the user has them stop the launcher.

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
