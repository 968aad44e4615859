"""Reads the journal block by block, and gives each event its position."""

from __future__ import annotations

from collections.abc import Iterator

from swift_ft.coordination.journal import EventLog
from swift_ft.recovery.blocks import Sequencer
from swift_ft.recovery.events import Entry

__all__ = ["JournalReader", "entries_of"]


class JournalReader:
    """Reads on from where it was. It belongs to one thread.

    Args:
        journal: the journal to read.

    Attributes:
        sequencer: of what was read.
    """

    def __init__(self, journal: EventLog) -> None:
        self._journal = journal
        self.sequencer = Sequencer()
        self._number = 0  # of the next block

    def next(self, timeout_s: float) -> list[Entry] | None:
        """Wait for the entries of the next block. None if it is not there in time; 0 does not wait."""
        block = self._journal.read(self._number, timeout_s)
        if block is None:
            return None
        self.sequencer, entries = self.sequencer.admit_all(block)
        self._number += 1
        return entries


def entries_of(journal: EventLog) -> Iterator[Entry]:
    """The entries that are there now."""
    reader = JournalReader(journal)
    while (entries := reader.next(0.0)) is not None:
        yield from entries
