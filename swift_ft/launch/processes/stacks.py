"""Stacks of workers that cannot tell them: one dies of its own native code, or a call holds its interpreter.

    worker ──(at a fatal signal, or at SIGNAL: Python's faulthandler)──▶ file in memory ──▶ agent

The handler needs no interpreter. The file has no name, and lasts as long as the agent has it open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import time
from pathlib import Path

from swift_ft.coordination.agent_channel import AgentChannel
from swift_ft.program.own_code import CodeLine, place_in

SIGNAL = signal.SIGRTMIN + 9
"""Asks a worker for its stack. No library is known to use it."""

_FATAL = "Fatal Python error"
"""Before what a process has written as it died, and not as it was asked."""
_BEGIN = "(most recent call first)"
_OUTERMOST = re.compile(r" in (<module>|_run_module_as_main)\n\Z|  \.\.\.\n\Z")
"""The last line of a main thread's stack: of a script, of a module, or of one that is too deep."""
_FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')
_POLL_S = 0.01
_MOST_BYTES = 1 << 16


def offer_stack(channel: AgentChannel) -> None:
    """Let the agent have this process's stack. A handler that the user has asked for stays as it is."""
    file = os.memfd_create("swift-stack")
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the agent empties it
    faulthandler.register(SIGNAL, file=file, all_threads=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=file, all_threads=False)
    channel.send(stack={"pid": os.getpid(), "fd": file})


class StackFile:
    """The agent's end.

    Args:
        pid: the worker's process.
        fd: the file in it.

    Raises:
        OSError: if it is gone.
    """

    def __init__(self, pid: int, fd: int) -> None:
        self._pid = pid
        self._file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def ask(self, limit_s: float) -> list[str]:
        """The place of a worker that lives: see :meth:`read`. Empty if it does not say so in time.

        Args:
            limit_s: how long to wait for it.
        """
        before = self._forget_answers()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, SIGNAL)
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            stacks = _stacks_in(self._written(before))
            if stacks and _OUTERMOST.search(stacks[0]):  # it is written piece by piece
                return _place(stacks[0])
            time.sleep(_POLL_S)
        return []

    def read(self) -> list[str]:
        """The innermost line of the user's own code where a process ended, and what it called.

        Empty if it wrote nothing.
        """
        written = self._written(max(0, os.fstat(self._file).st_size - _MOST_BYTES))
        _, died, last = written.rpartition(_FATAL)
        # From Python 3.14 on another stack follows, of C, without a line of Python.
        places = [place for stack in _stacks_in(last if died else "") if (place := _place(stack))]
        return places[-1] if places else []

    def close(self) -> None:
        """Give the file up."""
        os.close(self._file)

    def _forget_answers(self) -> int:
        """Empty the file if there is much in it, unless the process has died. Returns its size."""
        size = os.fstat(self._file).st_size
        if size <= _MOST_BYTES or _FATAL in self._written(size - _MOST_BYTES):
            return size
        os.truncate(self._file, 0)
        return 0

    def _written(self, since: int) -> str:
        return os.pread(self._file, _MOST_BYTES, since).decode(errors="replace")


def _stacks_in(text: str) -> list[str]:
    """The texts of all stacks in it, in the order of time."""
    return text.split(_BEGIN)[1:]


def _place(text: str) -> list[str]:
    found = [match.groups() for match in map(_FRAME.search, text.splitlines()) if match]
    stack = [CodeLine(file, int(number), name, Path(file).stem) for file, number, name in found]
    return [place_in(stack)] if stack else []
