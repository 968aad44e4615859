"""``swift-run``, forked from a process that has torch imported.

Those imports are half of the CPU time of a small run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from examples.commands import descendants
from swift_ft.testing.chaos.forked_launchers import ForkedLauncher, ForkServer


@dataclass(frozen=True)
class Launched:
    """How a launcher ended.

    Attributes:
        code: its exit code; negative if a signal ended it, and None if it did not end in time.
        output: what it and its children wrote.
        left: what was running then: after its end, left behind.
    """

    code: int | None
    output: str
    left: Sequence[str]


class LauncherProcess:
    """A running launcher.

    Args:
        output: what it and its children write.
        launcher: its process.
    """

    def __init__(self, output: int, launcher: ForkedLauncher) -> None:
        self._output = output
        self._launcher = launcher
        self._written = bytearray()

    @property
    def pid(self) -> int:
        """The launcher's own."""
        return self._launcher.pid

    def wait(self, timeout_s: float) -> Launched:
        """Waits until its output ends. Call it again if it did not end in time."""
        if not self._read(time.monotonic() + timeout_s):
            return Launched(None, self._text(), _described(descendants(self._launcher.keeper)))
        left = self._launcher.left(timeout_s)  # no process has its output open: what runs now was left behind
        return Launched(self._launcher.wait(), self._text(), _described(left))

    def end(self) -> None:
        """Kills what there still is of it."""
        keeper = self._launcher.keeper
        for pid in [*reversed(descendants(keeper)), keeper]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read(self, deadline: float) -> bool:
        """Whether the output has ended."""
        while (remaining := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._output], [], [], remaining)
            if ready:
                piece = os.read(self._output, 1 << 16)
                if not piece:
                    return True
                self._written += piece
        return False

    def _text(self) -> str:
        return self._written.decode(errors="replace")


@contextlib.contextmanager
def launch(arguments: Sequence[str], env: Mapping[str, str]) -> Iterator[LauncherProcess]:
    """Starts ``swift-run`` with these arguments and just this environment, and kills what is left of it."""
    reading, writing = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reading)
        try:
            started = _server().started(arguments, writing, cwd=Path.cwd(), environment=env)
            launcher = LauncherProcess(reading, stack.enter_context(started))
        finally:
            os.close(writing)
        stack.callback(launcher.end)
        yield launcher


def _described(pids: Sequence[int]) -> list[str]:
    """The number and the command line of each process that there still is."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(f"{pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}")
    return found


@cache
def _server() -> ForkServer:
    """The server of this test process, which ends with it."""
    made = ForkServer()
    atexit.register(made.close)
    return made
