"""Reads the journal block by block: from the newest snapshot on, each event with its position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swift_ft.coordination.block_log import BlockGoneError
from swift_ft.coordination.journal import EventLog
from swift_ft.errors import RendezvousLostError
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.job_state import State
from swift_ft.recovery.snapshot import JournalSnapshot


class JournalReader:
    """Reads on from where it was. It belongs to one thread.

    Args:
        journal: the journal to read.
        on_snapshot: called with the snapshot that it begins with, and with one that stands for blocks that
            were deleted before they were read: this process was frozen for long.

    Attributes:
        sequencer: has seen everything that was read.
        number: the block that follows.
    """

    def __init__(
        self, journal: EventLog, on_snapshot: Callable[[JournalSnapshot], None] | None = None
    ) -> None:
        self._journal = journal
        self._on_snapshot = on_snapshot
        self._begun = False
        self.sequencer = Sequencer()
        self.number = 0

    def next(self, timeout_s: float) -> list[Entry] | None:
        """Wait for the entries of the next block. None if it is not there in time; 0 does not wait.

        It is empty after a snapshot, and if all of the block was there before.
        """
        if not self._begun:
            self._begun = True
            if self._load():
                return []
        try:
            block = self._journal.read(self.number, timeout_s)
        except BlockGoneError as error:
            if not self._load():
                raise RendezvousLostError(f"No snapshot covers what is missing: {error}") from error
            return []
        if block is None:
            return None
        self.sequencer, entries = self.sequencer.admit_all(block)
        self.number += 1
        return entries

    def _load(self) -> bool:
        snapshot = self._journal.snapshot()
        if snapshot is None or snapshot.number <= self.number:
            return False
        self.sequencer, self.number = snapshot.sequencer, snapshot.number
        if self._on_snapshot is not None:
            self._on_snapshot(snapshot)
        return True


class Excerpt:
    """The entries that a reader has seen, and the state before the first of them.

    Attributes:
        began: the state before the entries; None if they are all that there ever were.
        entries: neighbours, in order.
    """

    def __init__(self) -> None:
        self.began: State | None = None
        self.entries: list[Entry] = []

    def on_snapshot(self, snapshot: JournalSnapshot) -> None:
        """Begin again from a snapshot, and forget the entries before it."""
        self.began = snapshot.state
        self.entries.clear()

    def on_entries(self, entries: Sequence[Entry]) -> None:
        """Note entries."""
        self.entries += entries
