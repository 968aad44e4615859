"""Statistics of what logging cost, iteration by iteration."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class IterationStats:
    """The cost of logging in one iteration, or in all so far.

    A cost that becomes known later (a copy that ended in the next iteration) counts in that iteration.

    Attributes:
        messages: how many were logged.
        bytes: size of their payloads, unpacked.
        bubble_s: how long the worker waited for messages.
        copied_in_bubbles_s: how long copies from the device to the host ran during these waits.
        copied_outside_s: how long such copies ran in parallel with computation.
        held_back_s: how long the training thread waited for room in the budget.
        queue_high_water_bytes: largest number of payload bytes that waited to be written.
        pool_high_water_bytes: largest amount of page-locked memory in use.
        step_s: duration of the step.
    """

    messages: int = 0
    bytes: int = 0
    bubble_s: float = 0.0
    copied_in_bubbles_s: float = 0.0
    copied_outside_s: float = 0.0
    held_back_s: float = 0.0
    queue_high_water_bytes: int = 0
    pool_high_water_bytes: int = 0
    step_s: float = 0.0

    def plus(self, other: IterationStats) -> IterationStats:
        """The sum of both."""
        return IterationStats(
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.bubble_s + other.bubble_s,
            self.copied_in_bubbles_s + other.copied_in_bubbles_s,
            self.copied_outside_s + other.copied_outside_s,
            self.held_back_s + other.held_back_s,
            max(self.queue_high_water_bytes, other.queue_high_water_bytes),
            max(self.pool_high_water_bytes, other.pool_high_water_bytes),
            self.step_s + other.step_s,
        )


class LogStats:
    """Sums up what logging costs. Thread-safe.

    What is counted with each message is counted in plain numbers: training waits for it.

    Attributes:
        last: the iteration that ended last.
        largest_bytes: payload bytes of the iteration that logged most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = IterationStats()
        # Of the current iteration; guarded by the lock.
        self._open = IterationStats()
        self._messages = self._bytes = self._queued_bytes = 0
        self._bubble_s = 0.0
        self.last = IterationStats()
        self.largest_bytes = 0

    @property
    def total(self) -> IterationStats:
        """Everything so far."""
        with self._lock:
            return self._closed.plus(self._current())

    @property
    def total_bytes(self) -> int:
        """The bytes of :attr:`total`, in a fraction of the time: they are asked for in each step."""
        with self._lock:
            return self._closed.bytes + self._open.bytes + self._bytes

    def logged(self, size: int) -> None:
        """Counts a message whose payload has so many bytes."""
        with self._lock:
            self._messages += 1
            self._bytes += size

    def waited(self, seconds: float) -> None:
        """Counts a wait for a message."""
        with self._lock:
            self._bubble_s += seconds

    def queued(self, size: int) -> None:
        """Notes that so many bytes wait to be written."""
        if size > self._queued_bytes:
            with self._lock:
                self._queued_bytes = max(self._queued_bytes, size)

    def add(self, more: IterationStats) -> None:
        """Adds to the current iteration."""
        with self._lock:
            self._open = self._open.plus(more)

    def end_iteration(self) -> IterationStats:
        """Ends the current iteration and returns its stats."""
        with self._lock:
            self.last, self._open = self._current(), IterationStats()
            self._messages = self._bytes = self._queued_bytes = 0
            self._bubble_s = 0.0
            self._closed = self._closed.plus(self.last)
            self.largest_bytes = max(self.largest_bytes, self.last.bytes)
            return self.last

    def _current(self) -> IterationStats:
        counted = IterationStats(
            self._messages, self._bytes, self._bubble_s, queue_high_water_bytes=self._queued_bytes
        )
        return self._open.plus(counted)


@dataclass(frozen=True)
class LogWriterMetrics:
    """A writer's counts so far.

    Attributes:
        bytes: written to segments, framing included.
        records: messages and receipts written.
        segments: committed.
        disk_bytes: of segments on the tier that is written to, those of earlier writers included.
        waiting_segments: complete, and not in the store yet.
    """

    bytes: int = 0
    records: int = 0
    segments: int = 0
    disk_bytes: int = 0
    waiting_segments: int = 0

    def plus(self, later: LogWriterMetrics) -> LogWriterMetrics:
        """The sum of both. Current values are those of the later one."""
        return replace(
            later,
            bytes=self.bytes + later.bytes,
            records=self.records + later.records,
            segments=self.segments + later.segments,
        )
