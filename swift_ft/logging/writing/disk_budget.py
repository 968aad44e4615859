"""The disk budget of a log, and how much of it is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from swift_ft.errors import UsageError

_SOFT = 0.8
"""Share of the budget above which an early checkpoint is requested."""

_ITERATIONS_AHEAD = 4
"""A checkpoint requested now is saved two iterations later, and committed while training continues."""


class DiskBudget:
    """Bytes of segments on the tier that is written to. Thread-safe.

    Args:
        budget_bytes: limit for their sum; None for no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._segments: dict[str, int] = {}  # committed, by path
        self._committed_bytes = 0  # the sum of those
        # Segments that are also in the store, the oldest first, and how to delete each.
        self._evictable: dict[str, Callable[[], None]] = {}
        self._evictable_bytes = 0
        self._open_bytes = 0
        self._suspensions = 0

    @property
    def bytes(self) -> int:
        """Used so far, the open segment included."""
        with self._changed:
            return self._used()

    def grow(self, open_bytes: int) -> None:
        """Sets the size of the open segment."""
        self._open_bytes = open_bytes  # by the one thread that writes

    def add(self, path: str, size: int) -> None:
        """Adds a complete segment."""
        with self._changed:
            self._segments[path] = size
            self._committed_bytes += size
            self._open_bytes = 0

    def remove(self, path: str) -> None:
        """Removes a deleted segment. Does nothing for an unknown one."""
        with self._changed:
            self._forget(path)
            self._changed.notify_all()

    def mark_evictable(self, path: str, evict: Callable[[], None]) -> None:
        """Marks a segment that may be deleted as soon as its room is needed; ``evict`` deletes it."""
        with self._changed:
            self._evictable[path] = evict
            self._evictable_bytes += self._segments.get(path, 0)
            self._changed.notify_all()

    def evict_down_to(self, limit_bytes: int) -> None:
        """Deletes evictable segments, the oldest first, down to ``limit_bytes`` of them."""
        self._evict(lambda: self._evictable_bytes > limit_bytes)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspends the limit: after a failure, messages still in memory must be written at once."""
        with self._changed:
            self._suspensions += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._suspensions -= 1

    def wait_until_fits(self, size: int, timeout_s: float) -> bool:
        """Waits for room, which an empty budget always has; False when the deadline passed first.

        Evicts segments where that makes room.
        """
        if self.budget_bytes is None:  # asked before each record
            return True
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size, self._evictable_bytes), timeout_s):
                return False
        self._evict(lambda: not self._fits(size))
        return True

    def nearly_full(self, iteration_bytes: int) -> bool:
        """Whether older segments should be deleted soon.

        Args:
            iteration_bytes: bytes of the iteration that logged most.

        Raises:
            UsageError: the budget is too small for any checkpoint to come in time.
        """
        if self.budget_bytes is None:
            return False
        needed = (_ITERATIONS_AHEAD + 1) * iteration_bytes
        if self.budget_bytes < needed:
            raise UsageError(
                f"log_budget_bytes leaves this worker's log {self.budget_bytes} bytes of disk, but one "
                f"iteration logs up to {iteration_bytes}: it needs {needed} at least, so that a checkpoint "
                "can be taken before it is full."
            )
        with self._changed:
            left = self.budget_bytes - self._used() + self._evictable_bytes
        return left < max((1 - _SOFT) * self.budget_bytes, _ITERATIONS_AHEAD * iteration_bytes)

    def _used(self) -> int:
        return self._committed_bytes + self._open_bytes

    def _fits(self, size: int, evictable_bytes: int = 0) -> bool:
        used = self._used() - evictable_bytes
        if self.budget_bytes is None or self._suspensions or not used:
            return True
        return used + size <= self.budget_bytes

    def _forget(self, path: str) -> None:
        size = self._segments.pop(path, 0)
        self._committed_bytes -= size
        if self._evictable.pop(path, None) is not None:
            self._evictable_bytes -= size

    def _evict(self, needed: Callable[[], bool]) -> None:
        gone = []
        with self._changed:
            while self._evictable and needed():
                path = next(iter(self._evictable))
                gone.append(self._evictable[path])
                self._forget(path)
        for evict in gone:
            evict()
