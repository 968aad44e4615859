"""Waits that say so: after ten seconds, then ever less often, what is waited for and until when.

:func:`waiting` is for the code that waits. One thread per process speaks for all its waits, since most
of them block in a call that cannot speak itself. The first wait starts it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swift_ft.units import format_seconds

_logger = logging.getLogger(__name__)

FIRST_S = 10.0
"""A wait that is over sooner is not announced."""


@dataclass(slots=True)
class Announcements:
    """When one wait is announced: after 10 s, 20 s, 40 s, and so on.

    Args:
        since: when the wait began, on any clock.
    """

    since: float
    next_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.next_at = self.since + FIRST_S

    def due(self, now: float) -> bool:
        """Whether to announce the wait now. True once for each announcement."""
        if now < self.next_at:
            return False
        while self.next_at <= now:
            self.next_at += self.next_at - self.since
        return True


def wait_in_words(
    what: str,
    waited_s: float,
    limit_s: float | None = None,
    *,
    flag: str = "",
    until_progress: bool = False,
    paused_s: float = 0.0,
) -> str:
    """One announcement: what is waited for, how long already, and for how long at most.

    Args:
        what: completes "waits for".
        waited_s: how long already.
        limit_s: the whole wait's limit; None or infinite if there is none.
        flag: the option of swift-run that sets the limit, if there is one.
        until_progress: the limit counts from the last progress, of which the reader knows no more than we.
        paused_s: of the whole wait, the time that does not count towards the limit.
    """
    text = f"waits for {what}: {_rounded(waited_s)} so far"
    if limit_s is None or limit_s == math.inf:
        return text
    by = f" ({flag} {limit_s:g})" if flag else ""
    if until_progress:
        return f"{text}, until {_rounded(limit_s)} pass without progress{by}"
    return f"{text}, at most {_rounded(max(0.0, limit_s + paused_s - waited_s))} more{by}"


def _rounded(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else format_seconds(seconds)


@contextlib.contextmanager
def waiting(what: str | Callable[[], str], limit_s: float | None = None, *, flag: str = "") -> Iterator[None]:
    """Announce the wait in the block, if it takes long, and its end, if it was announced.

    One that an exception ends is said to be given up: what it waited for did not come.

    Args:
        what: completes "waits for"; a callable is asked at each announcement, in the announcing thread.
        limit_s: the limit of the wait in the block; None or infinite if it has none.
        flag: the option of swift-run that sets the limit, if there is one.
    """
    speaker = _speaker()
    number = speaker.begin(_Wait(what, limit_s, flag))
    try:
        yield
    except BaseException:
        speaker.end(number, "given up")
        raise
    speaker.end(number, "over")


@dataclass(slots=True)
class _Wait:
    what: str | Callable[[], str]
    limit_s: float | None
    flag: str
    announcements: Announcements = field(default_factory=lambda: Announcements(time.monotonic()))
    announced: str = ""

    def announce(self, now: float) -> None:
        self.announced = self.what if isinstance(self.what, str) else self.what()
        text = wait_in_words(self.announced, now - self.announcements.since, self.limit_s, flag=self.flag)
        _logger.warning("%s", text, extra={"event": "waiting"})

    def announce_end(self, now: float, how: str) -> None:
        waited = _rounded(now - self.announcements.since)
        text = f"the wait for {self.announced} is {how} after {waited}"
        _logger.info("%s", text, extra={"event": "wait_over"})


class _Speaker:
    """The waits of this process, and the thread that announces them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._waits: dict[int, _Wait] = {}  # guarded by the condition, as the next one
        self._thread: threading.Thread | None = None
        self._sleeps_until = 0.0  # a wait that is due later need not wake the thread
        self._numbers = itertools.count()

    def begin(self, wait: _Wait) -> int:
        with self._changed:
            number = next(self._numbers)
            self._waits[number] = wait
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="swift-waits", daemon=True)
                self._thread.start()
            if wait.announcements.next_at < self._sleeps_until:
                self._changed.notify()
        return number

    def end(self, number: int, how: str) -> None:
        with self._changed:
            wait = self._waits.pop(number)
        if wait.announced:
            wait.announce_end(time.monotonic(), how)

    def _run(self) -> None:
        while True:
            with self._changed:
                times = (wait.announcements.next_at for wait in self._waits.values())
                self._sleeps_until = min(times, default=math.inf)
                if self._sleeps_until == math.inf:
                    self._changed.wait()
                    continue
                self._changed.wait(max(0.0, self._sleeps_until - time.monotonic()))
                now = time.monotonic()
                due = [wait for wait in self._waits.values() if wait.announcements.due(now)]
            for wait in due:
                wait.announce(now)


_lock = threading.Lock()
_own: _Speaker | None = None


def _speaker() -> _Speaker:
    """The speaker of this process: a thread does not survive a fork."""
    global _own
    with _lock:
        if _own is None or _own.pid != os.getpid():
            _own = _Speaker()
        return _own
