"""The handlers of the package's log in swift-run, its agents and its workers: lines on stderr, and a pipe.

The pipe brings log events of all of them to one process, which writes them down. They are forked from the
launcher and inherit its writing end. Sending never waits: what does not fit is dropped and counted.

A program that uses the library without swift-run configures ``logging.getLogger("swift_ft")`` itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from typing import Any, TextIO

from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import NotLaunchedError

_MAX_MESSAGE = 4000
"""Characters of a message, so that every packet fits into the socket's buffer."""
_MAX_PACKET = 64 * 1024
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes that every log record has. All others came with ``extra``."""


def show_log(prefix: str, *, apart: bool = False) -> None:
    """Show records of INFO and above on stderr, as ``prefix: message``.

    Does not touch the root logger. If that gets these records and has a handler that shows them, this one
    stays silent: no line appears twice.

    Args:
        prefix: what each line begins with. A second call replaces the handler of the first one.
        apart: the root logger does not get these records, unless the script asks for them later.
    """
    logger = logging.getLogger("swift_ft")
    for handler in logger.handlers[:]:
        if isinstance(handler, _ConsoleHandler):
            logger.removeHandler(handler)
    logger.addHandler(_ConsoleHandler(prefix))
    logger.propagate = logger.propagate and not apart
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    def __init__(self, prefix: str) -> None:
        super().__init__()  # writes to what sys.stderr is now
        self.setLevel(logging.INFO)
        self.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not _root_shows_records():
            super().emit(record)


def _root_shows_records() -> bool:
    """Whether the root logger has a handler other than for a file."""
    if not logging.getLogger("swift_ft").propagate:
        return False
    return any(not isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers)


class EventPipe:
    """A pipe for log events. Make it before the processes that use it are forked."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def write_from_here(self) -> None:
        """From now on, log events of this process, and of those that it forks, go into the pipe."""
        self._reader.close()
        logging.getLogger("swift_ft").addHandler(_PipeHandler(self._writer))

    def read_from_here(self) -> None:
        """Close the writing end: the calling process only reads."""
        self._writer.close()

    def mark(self) -> None:
        """Tell the reader that it has all that was sent before: it receives an empty event."""
        with contextlib.suppress(OSError):  # full, or no longer read: the reader's deadline ends its wait
            self._writer.send(b"{}", socket.MSG_DONTWAIT)

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next log event; an empty one is a mark. None when all writers are gone."""
        packet = self._reader.recv(_MAX_PACKET)
        return json.loads(packet) if packet else None


class _PipeHandler(logging.Handler):
    """Sends records that have an ``event``, with its name and the fields of ``extra``."""

    def __init__(self, writer: socket.socket) -> None:
        super().__init__(logging.INFO)
        self._writer = writer
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        facts = {name: value for name, value in vars(record).items() if name not in _OWN}
        event = facts.pop("event", None)
        if event is None:
            return
        machine, rank = _place()
        message = {
            "time": record.created,
            "event": event,
            "level": "error" if record.levelno >= logging.ERROR else record.levelname.lower(),
            "machine": machine,
            "rank": facts.pop("rank", rank),
            "message": record.getMessage()[:_MAX_MESSAGE],
            "fields": {"logger": record.name, **facts},
            "dropped": self._dropped,
        }
        try:
            self._writer.send(_packet_of(message), socket.MSG_DONTWAIT)
            self._dropped = 0
        except OSError:  # full, or too long, or no longer read
            self._dropped += 1


def _packet_of(message: dict[str, Any]) -> bytes:
    """A packet that the reader takes at once. Fields that are too long for that are only named."""
    packet = json.dumps(message, default=str).encode()
    if len(packet) > _MAX_PACKET:
        logger, *names = message["fields"]
        short = {logger: message["fields"][logger], "left_out": names}
        packet = json.dumps({**message, "fields": short}, default=str).encode()
    return packet


def _place() -> tuple[int | None, int | None]:
    """Slot and rank of this process, if it is a worker."""
    try:
        context = WorkerContext.from_env(os.environ)
    except NotLaunchedError:
        return None, None
    return context.slot, context.rank
