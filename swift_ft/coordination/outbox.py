"""Events on their way out of a process: stamped in order, and merged while others are on their way.

One thread writes at a time. What other threads append meanwhile is written together by the next one (group
commit), so the journal gets few blocks however many threads append.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from swift_ft.observe.waits import waiting
from swift_ft.recovery.blocks import Block, Stamped
from swift_ft.recovery.events import Event

MOST_EVENTS = 4096
"""Events of one block. It takes about half a megabyte then; a store takes no value of any size."""


@dataclass(slots=True, eq=False)
class _Pending:
    """What one thread has given, and waits for."""

    block: Block
    is_over: bool = False
    error: BaseException | None = None


class Outbox:
    """Stamps events and passes them on, in blocks.

    Args:
        by: the participant whose events these are, in words.
        write: writes a block. Called by one thread at a time. It returns once the block is in the journal.

    Attributes:
        origin: the process that appends these events.
    """

    def __init__(self, by: str, write: Callable[[Block], None]) -> None:
        self.origin = secrets.token_urlsafe(9)
        self._by = by
        self._write = write
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._serial = 0
        self._queue: deque[_Pending] = deque()
        self._writing = False

    def append(self, *events: Event) -> Stamped:
        """Write events, one after the other. Returns the last one once all are in the journal."""
        with self._changed:
            at = time.time()
            block = tuple(
                Stamped(event, at, self._by, self.origin, self._serial + number)
                for number, event in enumerate(events, 1)
            )
            self._serial += len(events)
            pending = self._queued(block)
        self._deliver(pending)
        return block[-1]

    def _queued(self, block: Block) -> _Pending:
        pending = _Pending(block)
        self._queue.append(pending)
        return pending

    def _deliver(self, mine: _Pending) -> None:
        with waiting("the journal to take an event"):  # the writer's own deadline ends this wait
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: mine.is_over or not self._writing)
                    if mine.is_over:
                        break
                    self._writing = True
                    batch = self._take()
                self._write_all(batch)
        if mine.error is not None:
            raise mine.error

    def _take(self) -> list[_Pending]:
        """The events of the next block."""
        batch = [self._queue.popleft()]
        events = len(batch[0].block)
        while self._queue and events + len(self._queue[0].block) <= MOST_EVENTS:
            events += len(self._queue[0].block)
            batch.append(self._queue.popleft())
        return batch

    def _write_all(self, batch: list[_Pending]) -> None:
        error: BaseException | None = None
        try:
            self._write(tuple(stamped for pending in batch for stamped in pending.block))
        except BaseException as caught:
            error = caught
        with self._changed:
            self._writing = False
            for pending in batch:
                pending.is_over, pending.error = True, error
            self._changed.notify_all()
