"""Counts what is under way in any thread, for whoever waits until nothing is."""

from __future__ import annotations

import threading


class UnderWay:
    """A context for each thing that is under way."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def over(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is under way. False if that does not come in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._count, timeout_s)
