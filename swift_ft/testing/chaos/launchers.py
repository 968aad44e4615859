"""The launchers that run now. A signal to this tool ends them, and no further one begins.

A launcher has a session of its own, so that a Ctrl-C at the terminal does not reach it beside this tool.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.forked_launchers import LAUNCHER, ForkedLauncher, ForkServer
from swift_ft.testing.chaos.leftovers import MARK, end_processes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_OVER = b"over"
_GUARD = """
import os, signal, sys
if not sys.stdin.read():
    os.kill(int(sys.argv[1]), signal.SIGTERM)
"""
_GRACE_S = 20.0
_LOOK_S = 0.2

_Launcher = ForkedLauncher | subprocess.Popen[bytes]


class StoppedError(SwiftError):
    """A signal has stopped this tool.

    Args:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


@dataclass(frozen=True, slots=True)
class LauncherEnd:
    """The end of a launcher.

    Attributes:
        code: its exit code; None if it was late.
        cpu_s: seconds that its processes have computed; None if that is not known.
    """

    code: int | None
    cpu_s: float | None = None


class Launchers:
    """Starts launchers in any thread, and stops all of them.

    The handler of a signal may interrupt any line of the main thread, so it waits for no lock and raises
    nothing: it sets a number, at which each thread with a launcher looks several times a second.
    """

    def __init__(self) -> None:
        self._number = 0  # of the signal; set by the main thread

    @contextlib.contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """In this context SIGINT, SIGTERM, SIGHUP and SIGQUIT stop all launchers. Of the main thread."""
        handled = [number for number in _SIGNALS if not _is_nohup(number)]
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._number = 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(number)

    def stop(self, number: int) -> None:
        """End all that run, and let no other one begin.

        Args:
            number: of the signal that asks for it.
        """
        self._number = number

    def check(self) -> None:
        """Raises what stops this thread, too.

        Raises:
            StoppedError: a signal has stopped all.
        """
        if self._number:
            raise StoppedError(self._number)

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        deadline_s: float,
        *,
        output: Path,
        cwd: Path | None,
        environment: Mapping[str, str] | None = None,
        server: ForkServer | None = None,
    ) -> LauncherEnd:
        """Run a module of Python until it ends. Its processes may go on where it is late.

        Args:
            arguments: after ``python -m``.
            folder: of the run, by which its processes are known.
            deadline_s: seconds after which it is ended.
            output: gets all that it prints.
            cwd: its working directory; None for this one.
            environment: more variables.
            server: forks it, where it can; None for a new interpreter.

        Raises:
            StoppedError: a signal has stopped all. No process of the run is left.
            SwiftError: the server has ended.
        """
        self.check()
        variables = {**os.environ, **(environment or {}), MARK: str(folder), "OMP_NUM_THREADS": "1"}
        with (
            output.open("wb") as console,
            _begun(arguments, console, cwd or Path.cwd(), variables, server) as process,
        ):
            try:
                code = self._wait(process, deadline_s)
            finally:
                _end(process)
                if self._number:
                    end_processes(folder)
            cpu_s = process.cpu_s if isinstance(process, ForkedLauncher) else None
        self.check()
        return LauncherEnd(code, cpu_s)

    def _wait(self, process: _Launcher, deadline_s: float) -> int | None:
        deadline = time.monotonic() + deadline_s
        while not self._number and (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left_s, _LOOK_S))
        return None


def _begun(
    arguments: Sequence[str],
    console: BinaryIO,
    cwd: Path,
    variables: Mapping[str, str],
    server: ForkServer | None,
) -> contextlib.AbstractContextManager[_Launcher]:
    """A launcher that is ended if this tool is killed.

    Networks make an ordinary user root of a namespace, which is where a new interpreter begins in any case.
    """
    if server is None or arguments[0] != LAUNCHER or ("--networks" in arguments and os.geteuid() != 0):
        return _executed(arguments, console, cwd, variables)
    return server.started(arguments[1:], console.fileno(), cwd=cwd, environment=variables)


@contextlib.contextmanager
def _executed(
    arguments: Sequence[str], console: BinaryIO, cwd: Path, variables: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=subprocess.STDOUT,
        env=variables,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        with _not_left_alone(process.pid):
            yield process
    finally:
        _end(process)


def _is_nohup(number: signal.Signals) -> bool:
    """Whether this tool is to go on when its terminal is closed."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


@contextlib.contextmanager
def _not_left_alone(pid: int) -> Iterator[None]:
    """End a launcher if SIGKILL ends this tool: a process waits for the end of a pipe that only this one has.

    The kernel's own signal for that (PR_SET_PDEATHSIG) comes with the end of a thread, and threads of a
    campaign end before it does.

    Args:
        pid: the launcher's.
    """
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate(_OVER)


def _end(process: _Launcher) -> None:
    """By SIGTERM, on which a launcher ends its processes; by SIGKILL if that takes too long."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()


LAUNCHERS = Launchers()
"""Those of this process, as its signals are."""
