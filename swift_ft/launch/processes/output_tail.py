"""Shows what workers write into their log files, on this process's own output, each line behind a prefix.

torchelastic looks at each file ten times a second, in a thread for each. One thread for all of them sleeps
until the kernel tells of a change. Where the kernel cannot (it has no inotify, or no user may have more of
it), it looks as often.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from swift_ft.errors import first_line
from swift_ft.observe.waits import waiting
from swift_ft.program.secrets import without_secrets

_logger = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Between two looks at files: what is written meanwhile is shown at once."""
_LAST_S = 5.0
"""The time for which the end of workers waits for an output to take what they have written last."""
_IN_MODIFY = 2
_EVENTS = 1 << 16
_LAST_LINES, _LAST_BYTES, _LINE = 3, 4096, 200
"""Of a file of errors, as evidence: so many lines of its last bytes, and so many characters of each."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A file that is shown.

    Attributes:
        path: of it. It is made if it is not there.
        output: gets what is written into it.
        prefix: what each line begins with.
    """

    path: str
    output: TextIO
    prefix: str


class OutputTail:
    """Shows files until it is stopped.

    Args:
        shown: which, and where.
    """

    def __init__(self, shown: Iterable[Shown]) -> None:
        self._files = [_File(one) for one in shown]
        self._changes = _watch([file.shown.path for file in self._files])
        self._stopped = threading.Event()
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._run, name="swift-output", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what is there by now, and nothing more.

        An output that is not read, as of a terminal after Ctrl-S, is left to its thread, which goes with the
        process: the agent has workers to end, and others to start.
        """
        if self._stopped.is_set():
            return
        os.write(self._wake_w, b"s")
        self._stopped.set()
        with waiting("the output to take the last lines of workers", _LAST_S):
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._wake_r, self._changes):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while not self._stopped.is_set():
            self._show()
            self._stopped.wait(_LOOK_S)
            if self._changes is not None:
                poll.poll()
                with contextlib.suppress(BlockingIOError):  # before the look, which sees what these tell of
                    os.read(self._changes, _EVENTS)
        self._show(to_end=True)
        for file in self._files:
            file.close()
        for fd in (self._wake_r, self._wake_w, self._changes):
            if fd is not None:
                os.close(fd)

    def _show(self, *, to_end: bool = False) -> None:
        for file in list(self._files):
            try:
                file.show(to_end=to_end)
            except (OSError, ValueError) as error:  # its reader is gone; the file goes on
                _logger.warning(
                    "what workers write into %s is shown no more: %s",
                    file.shown.path,
                    first_line(error),
                    extra={"event": "output_ended"},
                )
                file.close()
                self._files.remove(file)


def last_lines(path: str) -> tuple[str, ...]:
    """The last lines of a file that are not empty, the last one at the end; none if it cannot be read.

    Args:
        path: of it; a device, such as a terminal, has none.
    """
    found = Path(path)
    if not path or not found.is_file():
        return ()
    try:
        with found.open("rb") as file:
            file.seek(max(0, found.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ()
    last = [line.strip() for line in lines if line.strip()][-_LAST_LINES:]
    return tuple(without_secrets(line)[:_LINE] for line in last)


class _File:
    """One file, and how far it was shown. Progress bars end their lines with a return."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown
        self._file: BinaryIO = os.fdopen(os.open(shown.path, os.O_RDONLY | os.O_CREAT, 0o644), "rb")
        self._begun = b""  # a line that has not ended

    def show(self, *, to_end: bool) -> None:
        """Show the lines that have ended; a line that has only begun, too, if nothing follows."""
        new = self._file.read()
        if not new and not to_end:
            return
        text = self._begun + new
        end = len(text) if to_end else max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        lines, self._begun = text[:end].splitlines(keepends=True), text[end:]
        if lines:
            prefix, output = self.shown.prefix, self.shown.output
            output.write("".join(prefix + line.decode(errors="replace") for line in lines))
            output.flush()

    def close(self) -> None:
        """Show no more of it."""
        self._file.close()


def _watch(paths: Iterable[str]) -> int | None:
    """A descriptor that is readable when one of these files has changed; None if the kernel tells of none."""
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "inotify_init1"):
        return None
    fd: int = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return None
    for path in paths:
        if system.inotify_add_watch(fd, os.fsencode(path), _IN_MODIFY) < 0:
            os.close(fd)
            return None
    return fd
