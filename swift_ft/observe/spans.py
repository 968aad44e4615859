"""Spans of this process in a recovery: from a loss to its first completed iteration.

While nothing is lost, nothing is recorded: a span costs one comparison then. There is one recorder for each
process, as a recovery passes through many rooms. Who begins and takes a recording is
`coordination/recovery_trace.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

FIRST_ITERATION = "first iteration"
"""The lap in which the first wait is for the first message, or the first collective, of the new group."""

_MOST = 2048
"""Spans of one recording. A recovery has some dozens, and again for each loss in its course."""

_DETAILS = 1024
"""From so many spans on, details are left out: the rest of a long replay looks like its beginning."""

_WAIT = "wait for messages"

_DETAIL_NS = 100_000
"""A detail that is shorter is not worth its bytes."""

_NOTES = 512
"""Blocks of the journal of which a recording says when they came."""

_LOOKS = 5
_SAME_NS = 10_000
"""Both clocks are read so many times at most, until fewer nanoseconds than this lie between."""

_TOGETHER_NS = 20_000
"""Entries that are read so shortly after each other are of one block."""


class Span(NamedTuple):
    """Something that took time. Times are those of the host's monotonic clock, in nanoseconds.

    Attributes:
        name: what (docs/timeline.md lists them).
        began: when it began.
        ended: when it ended.
        thread: in which thread; empty for the main one.
        facts: such as bytes, iterations, or which machine; JSON-ready.
    """

    name: str
    began: int
    ended: int
    thread: str
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """The recording of one process in a recovery.

    Attributes:
        began: when it learned of the loss, or was started, by the host's monotonic clock in nanoseconds.
        ended: when the recording was taken.
        unix: Unix time in nanoseconds at ``began``, by the host's clock.
        spans: in the order of their ends.
        seen: of the journal, the first and the last position of some entries, and when the last one was seen.
        own: positions of events of this process, and when it appended them.
        left_out: details that found no room.
    """

    began: int
    ended: int
    unix: int
    spans: tuple[Span, ...]
    seen: tuple[tuple[int, int, int], ...]
    own: tuple[tuple[int, int], ...]
    left_out: int


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Recorder:
    """Records while it is active. All threads may use it.

    Args:
        now: the monotonic clock, in nanoseconds.

    Attributes:
        active: a recording has begun.
        begun: how many recordings ever did.
    """

    def __init__(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = now
        self.active = False
        self.begun = 0
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._began = self._unix = self._left_out = 0
        self._spans: list[Span] = []
        self._seen: list[tuple[int, int, int]] = []
        self._own: list[tuple[int, int]] = []
        # Owner: the main thread; the thread that takes the recording ends its lap.
        self._lap: tuple[str, int, dict[str, Any]] | None = None
        self._asleep = self._met = False

    def begin(self, since: int | None = None, *, awake: bool = False) -> None:
        """Begin to record, unless that has begun.

        Args:
            since: when it really began, on this clock.
            awake: the main thread knows of it, and need not be woken.
        """
        with self._lock:
            if self.active:
                return
            now = self.now()
            self._began = now if since is None else since
            self._unix = time.time_ns() - (now - self._began)
            self._left_out = 0
            self._spans, self._seen, self._own = [], [], []
            self._lap, self._asleep, self._met = None, not awake, False
            self.active = True
            self.begun += 1

    def take(self) -> Recording | None:
        """End the recording. None if there is none."""
        self.lap()
        with self._lock:
            if not self.active:
                return None
            self.active = False
            return Recording(
                self._began,
                self.now(),
                self._unix,
                tuple(self._spans),
                tuple(self._seen),
                tuple(self._own),
                self._left_out,
            )

    def drop(self) -> None:
        """Forget the recording: there was no recovery."""
        with self._lock:
            self.active, self._lap = False, None

    # ------------------------------------------------------------------------------------------- spans

    def span(self, name: str, *, detail: bool = False, **facts: Any) -> AbstractContextManager[None]:
        """Record the block, if a recording has begun before it.

        Args:
            detail: one of many of its kind, which may be left out.
            facts: about it, JSON-ready.
        """
        return _Block(self, name, facts, detail) if self.active else _NOTHING

    def add(self, name: str, began: int, *, detail: bool = False, thread: str = "", **facts: Any) -> None:
        """Record what began then and ends now. What began before the recording belongs to none, or another.

        Args:
            began: when it began.
            detail: see :meth:`span`.
            thread: where it happened, if not in this thread.
            facts: about it, JSON-ready.
        """
        ended, here = self.now(), threading.current_thread()
        if not thread and here is not threading.main_thread():
            thread = here.name
        if not (detail and ended - began < _DETAIL_NS):
            self._keep(Span(name, began, ended, thread, facts), _DETAILS if detail else _MOST)

    def _keep(self, span: Span, limit: int) -> None:
        with self._lock:
            if not self.active or span.began < self._began:
                return
            if len(self._spans) < limit:
                self._spans.append(span)
            else:
                self._left_out += 1

    def lap(self, name: str = "", **facts: Any) -> float:
        """End the present lap of the main thread and begin the next one; without a name begin none.

        Laps are spans that no block encloses: what lies between them is the user's code.

        Returns:
            How many seconds the lap took that ends; 0 if there was none.
        """
        if not self.active:
            return 0.0
        now, before = self.now(), self._lap
        self._lap = (name, now, facts) if name else None
        if before is None:
            return 0.0
        self._keep(Span(before[0], before[1], now, "", before[2]), _MOST)
        return (now - before[1]) / 1e9

    def woke(self) -> None:
        """The main thread has left what it did when the loss became known. Counts once."""
        if self.active and self._asleep:
            self._asleep = False
            self.add("wake", self._began)

    def while_waiting(self) -> AbstractContextManager[None]:
        """Record a wait for others in torch's communication."""
        if not self.active:
            return _NOTHING
        return self.span("first collective") if self._is_first() else self.span(_WAIT, detail=True)

    def on_collective(self, began: int) -> Callable[[object], None] | None:
        """For a collective for whose end no thread of Python waits: what to call at its end, if anything.

        Args:
            began: when it began.
        """
        if not (self.active and self._is_first()):
            return None
        return lambda _: self.add("first collective", began, thread="collectives")

    def _is_first(self) -> bool:
        first = not self._met and self._lap is not None and self._lap[0] == FIRST_ITERATION
        self._met = self._met or first
        return first

    # ----------------------------------------------------------------------------------------- positions

    def both_clocks(self) -> tuple[int, int]:
        """The monotonic clock and Unix time in nanoseconds, at one moment. The first is never read later."""
        for _ in range(_LOOKS):
            now, unix = self.now(), time.time_ns()
            if self.now() - now < _SAME_NS:  # else something came between
                break
        return now, unix

    def saw(self, first: int, last: int, at: int) -> None:
        """Positions of the journal were seen. Those that came together are one note, with the last time."""
        with self._lock:
            if not self.active:
                return
            if self._seen:
                noted, end, before = self._seen[-1]
                if first == end + 1 and at - before < _TOGETHER_NS:
                    self._seen[-1] = noted, last, at
                    return
            if len(self._seen) < _NOTES:
                self._seen.append((first, last, at))

    def appended(self, position: int, at: int) -> None:
        """An event of this process has this position, and was appended then."""
        with self._lock:
            if self.active and at >= self._began and len(self._own) < _NOTES:
                self._own.append((position, at))


class _Block:
    """A block that is recorded."""

    __slots__ = ("_began", "_detail", "_facts", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str, facts: dict[str, Any], detail: bool) -> None:
        self._recorder = recorder
        self._name = name
        self._facts = facts
        self._detail = detail

    def __enter__(self) -> None:
        self._began = self._recorder.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.add(self._name, self._began, detail=self._detail, **self._facts)


recorder = Recorder()
"""This process's own."""
