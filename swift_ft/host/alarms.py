"""Alarms: one thread runs all deadlines of this process that are not called off before.

``threading.Timer`` starts a thread for each. Who starts one waits until it runs, and a new thread gets a busy
core later than one that slept: up to 4 ms in a recovery, in which all workers are busy.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

_LONGEST_S = 3600.0
"""One wait of the thread: an alarm that is set meanwhile ends it."""


class Alarm:
    """Something that is to happen. Any thread may call it off.

    Args:
        function: is called in the thread of all alarms, so it must return soon. What it raises is logged.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function

    def cancel(self) -> None:
        """Call it off. It may be under way already."""
        self._function = None

    def ring(self) -> None:
        """Let it happen, unless it was called off."""
        function, self._function = self._function, None
        if function is not None:
            function()


class Alarms:
    """The alarms of a process. Its thread starts with the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._due: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def after(self, seconds: float, function: Callable[[], None]) -> Alarm:
        """Call a function after some time; see :class:`Alarm`."""
        alarm = Alarm(function)
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), alarm))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="swift-alarms", daemon=True)
                self._thread.start()
            elif self._due[0][2] is alarm:  # else the thread looks before it is due
                self._changed.notify()
        return alarm

    def _run(self) -> None:
        while True:
            alarm = self._next()
            try:
                alarm.ring()
            except Exception:  # the others still have to happen
                _logger.exception("what was to happen by now has failed", extra={"event": "alarm_failed"})

    def _next(self) -> Alarm:
        """Wait for the first one."""
        with self._changed:
            while not self._due or self._due[0][0] > time.monotonic():
                left_s = self._due[0][0] - time.monotonic() if self._due else _LONGEST_S
                self._changed.wait(min(max(left_s, 0.0), _LONGEST_S))
            return heapq.heappop(self._due)[2]


alarms = Alarms()
"""This process's own."""


def _forked() -> None:
    """A child has none of its parent's threads, nor their alarms."""
    vars(alarms).update(vars(Alarms()))  # all who import the object have this one


os.register_at_fork(after_in_child=_forked)
