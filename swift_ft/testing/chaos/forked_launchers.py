"""Launchers that are forked from a process which has imported torch already.

A new interpreter imports for three seconds of CPU time: more than a third of a small run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from swift_ft.errors import SwiftError
from swift_ft.testing.chaos.leftovers import MARK

LAUNCHER = "swift_ft.cli.run"
"""The module that is forked."""
_SERVER = "swift_ft.testing.chaos.fork_server"
_LONGEST = 4096
"""Bytes of a path on Linux."""
_ANSWER_S = 120.0
"""Longer than any import of torch."""
_MAX_ANSWER = 1 << 16


class ForkServer:
    """The process that launchers are forked from. It ends with this one, and so do they.

    Several threads may start launchers at a time. All of them have its seed of hashes.
    """

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                # A process with one thread may be forked; and room for the mark of each run.
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: "-" * _LONGEST},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it. Launchers that run go on."""
        self._requests.close()
        self._process.terminate()
        self._process.wait()

    @contextlib.contextmanager
    def started(
        self, arguments: Sequence[str], output: int, *, cwd: Path, environment: Mapping[str, str]
    ) -> Iterator[ForkedLauncher]:
        """Run ``swift-run`` with these arguments. If it is not over when the block ends, it is ended.

        Args:
            arguments: the flags, the script, and its arguments.
            output: descriptor of a file or a pipe for all that it and its children print.
            cwd: its working directory.
            environment: all of its variables.

        Raises:
            SwiftError: the server has ended.
        """
        request = {"arguments": [*arguments], "env": {**environment}, "folder": str(cwd.absolute())}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                try:
                    socket.send_fds(self._requests, [json.dumps(request).encode()], [output, theirs.fileno()])
                except BrokenPipeError:
                    raise _has_ended() from None
            yield ForkedLauncher(ours)


class ForkedLauncher:
    """A launcher, with the methods of a :class:`subprocess.Popen` that are needed.

    Args:
        control: to its keeper, the process that it is a child of.

    Attributes:
        pid: the launcher's process.
        keeper: its parent's, which gets what it leaves behind.
        cpu_s: once it is over, seconds that its processes have computed.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._code: int | None = None
        self.cpu_s: float | None = None
        if (told := self._told(_ANSWER_S)) is None:
            raise SwiftError(f"The process that launchers are forked from is silent for {_ANSWER_S:g} s.")
        self.pid: int = told["pid"]
        self.keeper: int = told["keeper"]

    def poll(self) -> int | None:
        """The exit code; negative for a signal, and None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it is over.

        Args:
            timeout: seconds.

        Raises:
            TimeoutExpired: it still runs.
        """
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("swift-run", timeout or 0.0)
        return code

    def terminate(self) -> None:
        """Send SIGTERM, on which it ends its processes."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def left(self, timeout: float) -> list[int]:
        """All that it has left behind: processes that still run some seconds after its end.

        Args:
            timeout: seconds until its end.

        Raises:
            TimeoutExpired: it still runs.
        """
        self.wait(timeout)
        self._control.send(b"left?")
        if (told := self._told(_ANSWER_S)) is None:
            raise SwiftError(f"The keeper of a launcher is silent for {_ANSWER_S:g} s.")
        return [*told["left"]]

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and (told := self._told(timeout)) is not None:
            self._code, self.cpu_s = told["code"], told["cpu_s"]
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _told(self, timeout: float | None) -> dict[str, Any] | None:
        """The next that the keeper says; None if that takes longer."""
        self._control.settimeout(timeout)
        try:
            packet = self._control.recv(_MAX_ANSWER)
        except (BlockingIOError, TimeoutError):
            return None
        if not packet:
            raise _has_ended()
        return dict(json.loads(packet))


def _has_ended() -> SwiftError:
    return SwiftError("The process that launchers are forked from has ended: see what it has printed.")
