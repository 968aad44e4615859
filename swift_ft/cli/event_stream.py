"""The events of a run as JSON lines of one schema, for ``--events-log`` (docs/events.md)."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from swift_ft.cli.operator_events import OPERATOR_EVENTS, JournalReader, Notice
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State

_logger = logging.getLogger(__name__)

_SCHEMA = 1

Line = dict[str, Any]
"""One event, with the keys of docs/events.schema.json."""


class EventStream:
    """Makes lines from the journal's entries and from log events.

    Args:
        emit: called with each line.

    Attributes:
        run_id: the run, once it is known.
    """

    def __init__(self, *emit: Callable[[Line], None]) -> None:
        self._emit = emit
        self._reader = JournalReader()
        self._host = socket.gethostname()
        self.run_id: str | None = None

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._reader.state.verdict is not None

    def begin(self, state: State) -> None:
        """Go on from a state. What led to it makes no lines."""
        self._reader.state = state

    def add_entry(self, entry: Entry, *, news: bool) -> None:
        """Apply an entry; lines are made only of what is news."""
        for notice in self._reader.apply(entry):
            if news:
                self._write(notice, at=entry.at, source="journal", position=entry.position)

    def add_record(self, record: dict[str, Any]) -> None:
        """Add what an :class:`EventPipe` has brought."""
        if record["dropped"]:
            text = f"{record['dropped']} log events are missing here: they came too fast"
            self.add("events_dropped", text, at=record["time"], dropped=record["dropped"])
        known = ("event", "message", "level", "machine", "rank", "fields")
        self._write(Notice(**{name: record[name] for name in known}), at=record["time"], source="log")

    def add(self, event: str, message: str, *, at: float, **fields: Any) -> None:
        """Add an event of this launcher."""
        level, _ = OPERATOR_EVENTS[event]
        self._write(Notice(event, message, level, fields=fields), at=at, source="launcher")

    def _write(self, notice: Notice, *, at: float, source: str, position: int | None = None) -> None:
        line = {
            "schema": _SCHEMA,
            "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "run": self.run_id,
            "generation": self._reader.state.generation,
            "event": notice.event,
            "level": notice.level,
            "machine": notice.machine,
            "rank": notice.rank,
            "message": notice.message,
            "source": source,
            "position": position,
            "host": self._host,
            "fields": notice.fields,
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
