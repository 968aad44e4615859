"""One log line for each refused connection, and few of them in a flood."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_LINES = 5
_INTERVAL_S = 60.0


class Refusals:
    """Logs refused connections: the first five of a minute each in a line, the others as their number.

    Args:
        where: the port that refuses, in words.
        clock: monotonic, in seconds.
    """

    def __init__(self, where: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._since = clock()
        self._lines = 0
        self._silent = 0

    def note(self, peer: str, reason: str) -> None:
        """One connection was refused."""
        with self._lock:
            silent = self._next_interval()
            self._lines += 1
            speaks = self._lines <= _LINES
            self._silent += not speaks
        self._log_silent(silent)
        if speaks:
            _logger.warning(
                "%s refused a connection from %s: %s",
                self._where,
                peer,
                reason,
                extra={"event": "connection_refused"},
            )

    @property
    def flush_at(self) -> float | None:
        """When :meth:`flush` has something to log, on the clock; None if nothing waits for that."""
        with self._lock:
            return self._since + _INTERVAL_S if self._silent else None

    def flush(self, *, now: bool = False) -> None:
        """Log how many were refused without a line of their own, once a minute is over or ``now``."""
        with self._lock:
            if now:
                self._since = self._clock() - _INTERVAL_S
            silent = self._next_interval()
        self._log_silent(silent)

    def _next_interval(self) -> int:
        if self._clock() - self._since < _INTERVAL_S:
            return 0
        silent, self._silent, self._lines, self._since = self._silent, 0, 0, self._clock()
        return silent

    def _log_silent(self, silent: int) -> None:
        if silent:
            _logger.warning(
                "%s refused %d more connection%s",
                self._where,
                silent,
                "s" * (silent != 1),
                extra={"event": "connection_refused"},
            )
