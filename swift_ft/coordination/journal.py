"""The journal: one totally ordered list of events in the rendezvous store, which every participant reads.

Events are written in blocks (`recovery/blocks.py`), of one event or of many, into a :class:`BlockLog`. Each
participant runs the pure protocol over the entries, so all of them hold the same state at the same position.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from swift_ft.coordination.block_log import BlockGoneError, BlockLog, StoreRenewedError, block_log_in
from swift_ft.observe.waits import waiting
from swift_ft.recovery.blocks import Block, Stamped, block_from_text, block_to_text
from swift_ft.recovery.events import Event
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_from_text
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

MOST_EVENTS = 4096
"""Events of one block. It takes about half a megabyte then; a store takes no value of any size."""


class EventLog(Protocol):
    """The interface of the journal for a participant, however its events get there and back.

    All methods may be called by several threads. They raise :class:`RendezvousLostError` if the journal is
    out of reach.
    """

    def append(self, *events: Event) -> Stamped:
        """Write events, one after the other. Returns the last one once all are in the journal."""

    def post(self, *events: Event) -> Stamped:
        """Have events written, before all that this process appends later. Where it can, it does not wait."""

    def note(self, key: str, facts: dict[str, Any]) -> None:
        """Replace what is known under a key (`coordination/relay/notes.py`). It does not wait."""

    def read(self, number: int, timeout_s: float) -> Block | None:
        """Wait for a block. None if it is not there in time; 0 does not wait.

        Raises:
            BlockGoneError: if it was deleted: the newest snapshot covers it.
        """

    def snapshot(self) -> JournalSnapshot | None:
        """The newest snapshot, or None if there is none yet. All blocks after it are there."""

    def give_up(self, error: BaseException) -> None:
        """Nothing is read any more: let those that wait for events to arrive fail."""


class Journal:
    """An :class:`EventLog` that goes to the store itself.

    Args:
        log: the blocks.
        by: the name under which this participant writes.

    Attributes:
        log: the blocks.
    """

    def __init__(self, log: BlockLog, *, by: str) -> None:
        self.log = log
        self._outbox = Outbox(by, self._write)

    def append(self, *events: Event) -> Stamped:
        """See :meth:`EventLog.append`. Events of several threads become one block, if they come together."""
        return self._outbox.append(*events)

    def post(self, *events: Event) -> Stamped:
        """See :meth:`EventLog.post`. A relay, which would take the events at once, is not there: it waits."""
        return self._outbox.append(*events)

    def note(self, key: str, facts: dict[str, Any]) -> None:
        """See :meth:`EventLog.note`. There is no relay that would take it, so it is lost."""

    def pass_on(self, block: Block) -> None:
        """Write events of other origins. Returns once they are in the journal. One thread at a time calls it.

        Raises:
            StoreRenewedError: nothing was written. Append the unconfirmed events again first.
        """
        self.log.append(block_to_text(block), _name(block))

    def read(self, number: int, timeout_s: float) -> Block | None:
        """See :meth:`EventLog.read`."""
        text = self.log.read(number, timeout_s)
        return None if text is None else block_from_text(text)

    def snapshot(self) -> JournalSnapshot | None:
        """See :meth:`EventLog.snapshot`."""
        text = self.log.snapshot()
        return None if text is None else snapshot_from_text(text)

    def give_up(self, error: BaseException) -> None:
        """See :meth:`EventLog.give_up`. Who writes to the store itself does not wait for what is read."""

    def is_empty(self, timeout_s: float = 0.0) -> bool:
        """Whether nothing has happened yet, nor happens in so many seconds."""
        try:
            return self.log.read(0, timeout_s) is None
        except BlockGoneError:
            return False

    def _write(self, block: Block) -> None:
        while True:
            try:
                self.log.append(block_to_text(block), _name(block))
            except StoreRenewedError:  # each event was waited for, so there are none before these
                continue
            return


def _name(block: Block) -> str:
    return f"{block[0].origin}.{block[0].serial}"


def open_journal(connect: Callable[[], RendezvousStore], *, by: str) -> Journal:
    """The journal in a rendezvous store.

    Args:
        connect: opens the journal's own client of the store, since its reads wait without a limit.
        by: the name under which this participant writes.
    """
    return Journal(block_log_in(connect()), by=by)


# Events on their way out of a process: stamped in order, and merged while others are on their way.
#
# One thread writes at a time. What other threads append meanwhile is written together by the next one (group
# commit), so the journal gets few blocks however many threads append.


@dataclass(slots=True, eq=False)
class _Pending:
    """A block that one thread has given, and waits for until it is written or has failed."""

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
