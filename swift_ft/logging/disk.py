"""How much of its disk budget a log has used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from swift_ft.errors import UsageError

__all__ = ["DiskUse"]

_SOFT = 0.8
"""Share of the budget from which a checkpoint is wanted."""

_ITERATIONS_AHEAD = 4
"""A checkpoint that is asked for now is saved two iterations later, and committed while others run."""


class DiskUse:
    """Bytes of segments on the tier that is written to. For use by several threads.

    Args:
        budget_bytes: what they may be together; None for no limit.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._changed = threading.Condition()
        self._segments: dict[str, int] = {}  # committed, by path
        self._committed_bytes = 0  # the sum of those
        # Those that may go at any time, the oldest first, and how: they are in the store, too.
        self._spare: dict[str, Callable[[], None]] = {}
        self._spare_bytes = 0
        self._open_bytes = 0
        self._lifted = 0

    @property
    def bytes(self) -> int:
        """Used so far, the open segment included."""
        with self._changed:
            return self._used()

    def grow(self, open_bytes: int) -> None:
        """The open segment has this size now."""
        self._open_bytes = open_bytes  # by the one thread that writes

    def add(self, path: str, size: int) -> None:
        """A segment is complete."""
        with self._changed:
            self._segments[path] = size
            self._committed_bytes += size
            self._open_bytes = 0

    def remove(self, path: str) -> None:
        """A segment was deleted. One that is not known is fine."""
        with self._changed:
            self._forget(path)
            self._changed.notify_all()

    def spare(self, path: str, let_go: Callable[[], None]) -> None:
        """A segment may go as soon as its room is needed; ``let_go`` deletes it."""
        with self._changed:
            self._spare[path] = let_go
            self._spare_bytes += self._segments.get(path, 0)
            self._changed.notify_all()

    def keep_spare(self, limit_bytes: int) -> None:
        """Lets go of spare segments, the oldest first, until the others take no more than this."""
        self._let_go(lambda: self._spare_bytes > limit_bytes)

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Everything fits for a while: after a failure, what is still in memory must be written at once."""
        with self._changed:
            self._lifted += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._lifted -= 1

    def wait_until_fits(self, size: int, timeout_s: float) -> bool:
        """Waits for room, which an empty budget always has; False when the deadline passed first.

        Spare segments are let go of where that is what it takes.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(size, self._spare_bytes), timeout_s):
                return False
        self._let_go(lambda: not self._fits(size))
        return True

    def nearly_full(self, iteration_bytes: int) -> bool:
        """Whether older segments should go soon.

        Args:
            iteration_bytes: the most that one iteration has logged.

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
            left = self.budget_bytes - self._used() + self._spare_bytes
        return left < max((1 - _SOFT) * self.budget_bytes, _ITERATIONS_AHEAD * iteration_bytes)

    def _used(self) -> int:
        return self._committed_bytes + self._open_bytes

    def _fits(self, size: int, spare_bytes: int = 0) -> bool:
        used = self._used() - spare_bytes
        if self.budget_bytes is None or self._lifted or not used:
            return True
        return used + size <= self.budget_bytes

    def _forget(self, path: str) -> None:
        size = self._segments.pop(path, 0)
        self._committed_bytes -= size
        if self._spare.pop(path, None) is not None:
            self._spare_bytes -= size

    def _let_go(self, needed: Callable[[], bool]) -> None:
        gone = []
        with self._changed:
            while self._spare and needed():
                path = next(iter(self._spare))
                gone.append(self._spare[path])
                self._forget(path)
        for let_go in gone:
            let_go()
