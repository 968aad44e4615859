"""Events that a process has appended or passed on, and has not yet seen in the journal.

Nothing answers them: an event has arrived when it comes back in a block. Until then it is kept, and sent
again when the way to the journal changes. Readers drop what is in the journal twice, so that is harmless.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable

from swift_ft.config import detection_timings as timings
from swift_ft.errors import RendezvousLostError
from swift_ft.observe.waits import waiting
from swift_ft.recovery.blocks import Block, Stamped
from swift_ft.recovery.events import Event, PartPersisted
from swift_ft.recovery.snapshot import JournalSnapshot


def _allowed_s(stamped: Stamped) -> float:
    return timings.PART_ALLOWED_S if isinstance(stamped.event, PartPersisted) else timings.EVENT_ALLOWED_S


class Outgoing:
    """Events on their way to the journal, in the order in which they came. All threads may use it.

    Args:
        now: a monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._events: dict[tuple[str, int], Stamped] = {}
        self._since: dict[tuple[str, int], float] = {}
        self._error: BaseException | None = None  # once nothing arrives any more
        self._unwritten: dict[tuple[str, int], BaseException] = {}  # by event

    def __contains__(self, stamped: Stamped) -> bool:
        """Whether this very event is on its way."""
        return (stamped.origin, stamped.serial) in self._events

    def add(self, block: Iterable[Stamped]) -> None:
        """Keep events, until they have arrived."""
        now = self._now()
        with self._changed:
            for stamped in block:
                self._events.setdefault((stamped.origin, stamped.serial), stamped)
                self._since.setdefault((stamped.origin, stamped.serial), now)

    def arrived(self, block: Iterable[Stamped]) -> None:
        """Forget events that are in the journal."""
        if not self._events:
            return
        with self._changed:
            found = [key for s in block if (key := (s.origin, s.serial)) in self._events]
            for key in found:
                del self._events[key], self._since[key]
                self._unwritten.pop(key, None)
            if found:
                self._changed.notify_all()

    def covered(self, snapshot: JournalSnapshot) -> None:
        """Forget events that a snapshot stands for: their blocks may be gone before they are read."""
        self.arrived(stamped for stamped in self.all() if snapshot.sequencer.has(stamped))

    def all(self) -> Block:
        """The events that have not arrived yet."""
        with self._changed:
            return tuple(self._events.values())

    def waits_since(self) -> float | None:
        """Since when the oldest event is on its way; None if none is."""
        with self._changed:
            return next(iter(self._since.values()), None)

    def is_overdue(self) -> bool:
        """Whether an event should have arrived by now, wherever relays may hold it for a while.

        Never once all waits have ended: what would arrive is not read.
        """
        now = self._now()
        with self._changed:
            if self._error is not None:
                return False
            return any(now - since > _allowed_s(self._events[key]) for key, since in self._since.items())

    def give_up(self, error: BaseException) -> None:
        """End all waits, also those to come: what arrives is not read any more."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def write_failed(self, error: BaseException) -> None:
        """End the waits for the events of now. They stay on their way: the store may be there again later."""
        with self._changed:
            self._unwritten = dict.fromkeys(self._events, error)
            self._changed.notify_all()

    def confirm(self, stamped: Stamped, limit_s: float) -> None:
        """Wait until an event has arrived.

        Raises:
            RendezvousLostError: if it does not, in time.
        """
        key = stamped.origin, stamped.serial
        with waiting("the journal to take an event", limit_s), self._changed:

            def error() -> BaseException | None:
                return self._error or self._unwritten.get(key)

            self._changed.wait_for(lambda: key not in self._events or error() is not None, limit_s)
            if key not in self._events:
                return
            if (found := error()) is not None:
                raise RendezvousLostError(f"The journal cannot be written: {found}") from found
        raise RendezvousLostError(
            f"The rendezvous store does not answer: the journal has not taken an event within {limit_s:g} s "
            "(--rendezvous-timeout). Start the store again if it is gone, and the run with --resume."
        )


class Stamper:
    """Stamps this process's own events.

    Attributes:
        origin: the process that appends them.
        lock: held from the stamping of events until they are on their way, so that they leave in order.
    """

    def __init__(self, by: str) -> None:
        self.origin = secrets.token_urlsafe(9)
        self.lock = threading.Lock()
        self._by = by
        self._serial = 0  # guarded by the lock

    def stamp(self, events: Iterable[Event]) -> Block:
        """The events with their stamps. The caller holds the lock."""
        at, block = time.time(), []
        for event in events:
            self._serial += 1
            block.append(Stamped(event, at, self._by, self.origin, self._serial))
        return tuple(block)
