"""``swift-run``, forked from a process that has torch imported (``prefork_server.py``).

Those imports are half of the CPU time of a small run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from examples.commands import descendants

_IMPORTED_S = 120.0


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
        control: of its keeper, the process that it is a child of, and that inherits what it leaves behind.
    """

    def __init__(self, output: int, control: socket.socket) -> None:
        self._output = output
        self._control = control
        self._written = bytearray()
        self.keeper = int(self._answer(_IMPORTED_S)["pid"])

    @property
    def pid(self) -> int:
        """The launcher's own."""
        return descendants(self.keeper)[0]

    def wait(self, timeout_s: float) -> Launched:
        """Waits until its output ends. Call it again if it did not end in time."""
        if not self._read(time.monotonic() + timeout_s):
            return Launched(None, self._text(), _described(descendants(self.keeper)))
        self._control.send(b"left?")  # no process has its output open: what runs now was left behind
        answer = self._answer(timeout_s)
        return Launched(answer["code"], self._text(), _described(answer["left"]))

    def end(self) -> None:
        """Kills what there still is of it."""
        for pid in [*reversed(descendants(self.keeper)), self.keeper]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        answer = self._control.recv(1 << 16)
        assert answer, "the server that launchers are forked from has ended: see what it wrote"
        return dict(json.loads(answer))

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
    request = json.dumps({"arguments": list(arguments), "env": dict(env), "folder": str(Path.cwd())})
    reading, writing = os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, reading)
        stack.enter_context(ours)
        with theirs:
            try:
                socket.send_fds(_server(), [request.encode()], [writing, theirs.fileno()])
            finally:
                os.close(writing)
        launcher = LauncherProcess(reading, ours)
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
def _server() -> socket.socket:
    """The server of this test process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.support.prefork_server", str(theirs.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # a process with one thread may be forked
        )
    atexit.register(_end, ours, process)
    return ours


def _end(requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
    requests.close()
    process.wait(_IMPORTED_S)
