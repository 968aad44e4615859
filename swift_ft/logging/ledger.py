"""What logging cost, iteration by iteration."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Account", "Ledger"]


@dataclass(frozen=True, slots=True)
class Account:
    """What happened in one iteration, or in all so far.

    What becomes known later (a copy that ended in the next iteration) is counted where it becomes known.

    Attributes:
        messages: logged.
        bytes: of their payloads, as they were sent.
        bubble_s: the worker waited for messages.
        copied_in_bubbles_s: copies from the device to the host ran meanwhile.
        copied_outside_s: such copies ran beside computation.
        held_back_s: the training thread waited for room in the budget.
        queue_high_water_bytes: most payload bytes that waited to be written.
        pool_high_water_bytes: most page-locked memory that was in use.
        step_s: from the begin of the step to its end.
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

    def plus(self, other: Account) -> Account:
        """Both together."""
        return Account(
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


class Ledger:
    """Keeps the accounts. For use by several threads.

    Attributes:
        last: the iteration that ended last.
        largest_bytes: payload bytes of the iteration that logged most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = Account()
        self._open = Account()
        self.last = Account()
        self.largest_bytes = 0

    @property
    def total(self) -> Account:
        """Everything so far."""
        with self._lock:
            return self._closed.plus(self._open)

    def add(self, more: Account) -> None:
        """Something happened in the iteration that runs."""
        with self._lock:
            self._open = self._open.plus(more)

    def end_iteration(self) -> Account:
        """The account of the iteration that ends here."""
        with self._lock:
            self.last, self._open = self._open, Account()
            self._closed = self._closed.plus(self.last)
            self.largest_bytes = max(self.largest_bytes, self.last.bytes)
            return self.last
