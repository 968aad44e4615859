"""A log that cannot be written is suspended: it gets a gap, and is whole again after it."""

from __future__ import annotations

from swift_ft.logging.writing.queue_items import QueueItem


class SuspendedError(Exception):
    """The log was suspended while the thread wrote a record."""


class Suspension:
    """The messages that a writer drops. Not thread-safe: the writer's lock guards it.

    A gap ends between two iterations: messages are dropped while the log is suspended, and from then on until
    the iteration ends.

    Attributes:
        reason: why nothing is logged now; empty if it is.
        whole_from: the first iteration after the last gap.
    """

    def __init__(self) -> None:
        self.reason, self.whole_from = "", 0
        self._latest = -1

    def drops(self, item: QueueItem) -> bool:
        """Whether an item is in the gap. Call it once for each item that is queued."""
        if item.iteration is None:
            return bool(self.reason)
        self._latest = max(self._latest, item.iteration)
        return bool(self.reason) or item.iteration < self.whole_from

    def begin(self, reason: str) -> bool:
        """The log cannot be written. False if that is known already."""
        known, self.reason = bool(self.reason), self.reason or reason
        return not known

    def end(self) -> int:
        """The log can be written again. Returns the first iteration that will be whole."""
        self.reason, self.whole_from = "", self._latest + 1
        return self.whole_from
