"""The events of a run as JSON lines of one schema, for ``--events-log`` (docs/events.md)."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from swift_ft.cli.news import News, news
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History

_logger = logging.getLogger(__name__)

_SCHEMA = 1

Line = dict[str, Any]
"""One event, with the keys of docs/events.schema.json."""


class EventStream:
    """Makes lines from the news in the journal's entries, and from log events.

    Args:
        history: of the run; the generation at the time of a line is taken from it.
        emit: called with each line.

    Attributes:
        run_id: the run, once it is known.
    """

    def __init__(self, history: History, *emit: Callable[[Line], None]) -> None:
        self._history = history
        self._emit = emit
        self._host = socket.gethostname()
        self.run_id: str | None = None

    def add_news(self, found: Iterable[News], entry: Entry) -> None:
        """Add the news in an entry of the journal."""
        for one in found:
            if one.level:
                self._write(one, at=entry.at, source="journal", position=entry.position)

    def add_record(self, record: dict[str, Any]) -> None:
        """Add what an :class:`EventPipe` has brought."""
        if record["dropped"]:
            self.add("events_dropped", at=record["time"], dropped=record["dropped"])
        known = {name: record[name] for name in ("event", "level", "machine", "rank", "fields")}
        self._write(News(0.0, record["message"], **known), at=record["time"], source="log")

    def add(self, event: str, *, at: float, **facts: Any) -> None:
        """Add an event of this launcher."""
        self._write(news(event, **facts), at=at, source="launcher")

    def _write(self, one: News, *, at: float, source: str, position: int | None = None) -> None:
        line = {
            "schema": _SCHEMA,
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "run": self.run_id,
            "generation": self._history.state.generation,
            "event": one.event,
            "level": one.level,
            "machine": one.machine,
            "rank": one.rank,
            "message": one.text,
            "source": source,
            "position": position,
            "host": self._host,
            "fields": one.fields,
        }
        for emit in self._emit:
            emit(line)


class EventFile:
    """Appends lines to a file, or writes them to stderr.

    Args:
        target: the file, or ``-`` for stderr.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._failed = False

    def __call__(self, line: Line) -> None:
        """Append one line. The file is opened again, so that it may be rotated; trouble is said once."""
        text = json.dumps(line) + "\n"
        try:
            if self._target == "-":
                sys.stderr.write(text)
                sys.stderr.flush()
                return
            file = os.open(self._target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
        except OSError as error:
            if not self._failed:
                self._failed = True
                _logger.warning(
                    "Events are missing in %s (%s). The run continues.",
                    self._target,
                    error,
                    extra={"event": "events_not_written"},
                )
