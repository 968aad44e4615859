"""Keeps the journal short: a snapshot now and then, and no blocks that it covers.

A snapshot stands for all that was before. Newcomers read it and the blocks after it, and the blocks before it
are deleted. It lies an interval back, so that a reader that is a little behind needs none. A reader that is
further behind goes on from it. One agent has the duty to write, which follows from the state. If it is lost,
the next one has it.

Where a session archives the journal, nothing is deleted before it is archived: the worker that goes on with
the archive finds in the journal all that is missing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from swift_ft.config import store_keys
from swift_ft.coordination.block_log import BlockLog
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.job_state import State
from swift_ft.recovery.snapshot import JournalSnapshot, snapshot_to_text
from swift_ft.torch_adapters.rendezvous_store import RendezvousStore

_logger = logging.getLogger(__name__)

EVERY = 1000
"""Events of an interval, at least: a newcomer reads so many in a few hundredths of a second."""
_EVENTS_PER_WORKER = 4
"""An interval grows with the job: what its snapshot costs stays in proportion to what its events cost."""
_MOST_MARKS = 64
"""Ends of intervals that are remembered while the archive is behind."""


def writes_snapshots(state: State, machine: str) -> bool:
    """Whether it is the duty of a machine's agent: that of the lowest filled slot."""
    return state.membership.first == machine


def may_have_snapshot(state: State, events: int) -> bool:
    """Whether a journal of so many events may have a snapshot: the first one comes after two intervals."""
    return events // _interval(state, EVERY) >= 2


def _interval(state: State, every: int) -> int:
    return max(every, _EVENTS_PER_WORKER * state.world_size)


class ArchivedPosition:
    """The position up to which the journal is archived, for the agent that deletes: in the rendezvous store.

    Args:
        store: a client of it.
    """

    def __init__(self, store: RendezvousStore) -> None:
        self._store = store

    def note(self, position: int) -> None:
        """All entries before a position are archived. With 0 a worker says that it is about to archive."""
        key = store_keys.journal_archived()
        before = self._store.compare_set(key, "", str(position)).decode()
        while int(before) < position:
            found = self._store.compare_set(key, before, str(position)).decode()
            if found == str(position):
                break
            before = found

    def read(self) -> int | None:
        """The position. None if it is not archived."""
        key = store_keys.journal_archived()
        return int(self._store.get(key)) if self._store.check([key]) else None


class Compactor:
    """Writes snapshots and deletes what they cover, if that is this machine's duty.

    Args:
        open_log: opens the log of the journal. Called in the background, once this machine has the duty.
        archived: how far the journal is archived; None if it is not archived.
        machine: the present name of this machine.
        background: runs what waits for the store, one thing after the other.
        every: events of an interval, at least.
        on_covered: called in the background with the newest snapshot that the journal may begin with.
    """

    def __init__(
        self,
        open_log: Callable[[], BlockLog],
        archived: Callable[[], int | None],
        machine: Callable[[], str],
        background: Executor,
        every: int = EVERY,
        on_covered: Callable[[JournalSnapshot], None] = lambda _: None,
    ) -> None:
        self._open_log = open_log
        self._archived = archived
        self._machine = machine
        self._background = background
        self._every = every
        self._on_covered = on_covered
        self._lock = threading.Lock()
        # Ends of intervals that no snapshot was written for; guarded by the lock.
        self._marks: deque[JournalSnapshot] = deque(maxlen=_MOST_MARKS)
        self._last = 0  # the position of the last mark; owner: the journal thread
        self._log: BlockLog | None = None  # owner: the background

    def on_block(self, now: JournalSnapshot) -> None:
        """Note where the journal stands. Called in the journal thread after each block."""
        position = now.sequencer.position
        interval = _interval(now.state, self._every)
        if position // interval <= self._last // interval:
            return
        self._last = position
        with self._lock:
            self._marks.append(now)
        self._background.submit(self._compact, writes_snapshots(now.state, self._machine()))

    def _compact(self, writes: bool) -> None:
        try:
            if (covered := self._newest_covered()) is not None:
                if writes:
                    self._write(covered)
                self._on_covered(covered)
                self._forget_marks(covered)
        except RendezvousLostError as error:
            _logger.debug("no snapshot is written: %s", error, extra={"event": "snapshot_failed"})
        except Exception:
            _logger.exception("No snapshot of the journal is written.", extra={"event": "snapshot_failed"})

    def _newest_covered(self) -> JournalSnapshot | None:
        archived = self._archived()
        with self._lock:
            older = [*self._marks][:-1]  # the newest one stays an interval ahead
        covered = [mark for mark in older if _may_go(mark, archived)]
        return covered[-1] if covered else None

    def _write(self, newest: JournalSnapshot) -> None:
        if self._log is None:
            self._log = self._open_log()
        self._log.put_snapshot(snapshot_to_text(newest), newest.number)
        self._log.delete_before(newest.number)

    def _forget_marks(self, newest: JournalSnapshot) -> None:
        with self._lock:
            while self._marks and self._marks[0].number <= newest.number:
                self._marks.popleft()


def _may_go(mark: JournalSnapshot, archived: int | None) -> bool:
    """Whether what is before a mark may be deleted."""
    if archived is None:
        return not mark.state.has_sessions  # a worker with a session is about to archive
    return mark.sequencer.position <= archived
