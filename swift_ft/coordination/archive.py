"""The archive of a run's journal, in the store of its session: the rendezvous store ends with the job.

    runs/<run>/journal/00000000-00000041.json   the entries 0 to 41, sealed with a digest

A file never changes. It may overlap others, because a writer whose outcome is unknown writes again, and
because the writer after a lost one knows only which files are there. Entries never change either, so a
reader takes each from any file. A file that lies within a newer one may be deleted.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from swift_ft.checkpoint.store_claim import journal_directory
from swift_ft.errors import SwiftError, first_line
from swift_ft.recovery.entries import Entry, entry_from_dict
from swift_ft.recovery.job_state import Phase, State
from swift_ft.recovery.snapshot import JournalSnapshot
from swift_ft.storage.digest import sealed
from swift_ft.storage.sealed_file import GONE, read_whole
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\d{8,})-(\d{8,})\.json")
_FULL = 1000
"""Entries of a file that grows no more: few large files are read faster than many small ones."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The positions in one file of the archive, both included."""

    first: int
    last: int

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.first:08d}-{self.last:08d}.json"


def end_of(spans: Iterable[Span]) -> int:
    """The first position that is in no file."""
    end = 0
    for span in sorted(spans):
        if span.first > end:
            return end
        end = max(end, span.last + 1)
    return end


@dataclass(frozen=True, slots=True)
class JournalArchive:
    """The archive of one run's journal.

    Attributes:
        run_id: the run.
    """

    store: Store
    run_id: str

    @property
    def directory(self) -> str:
        """The folder of the files."""
        return journal_directory(self.run_id)

    def spans(self) -> list[Span]:
        """The archived entries, in order."""
        found = [_NAME.fullmatch(name) for name in self.store.list(self.directory)]
        return sorted(Span(int(match[1]), int(match[2])) for match in found if match is not None)

    def write(self, entries: Sequence[Entry]) -> Span:
        """Write neighbouring entries. The same entries make the same file."""
        span = Span(entries[0].position, entries[-1].position)
        content = {"run_id": self.run_id, "entries": [entry.to_dict() for entry in entries]}
        self.store.write_json(f"{self.directory}/{span.name}", sealed(content))
        return span

    def read(self, span: Span) -> list[Entry]:
        """The entries of a file.

        Raises:
            FileNotFoundError: if it is gone, because its entries are in another one by now.
            SwiftError: if it is not what was written, or another version wrote it.
        """
        path = f"{self.directory}/{span.name}"
        content, damage = read_whole(self.store, path)
        if damage == GONE:
            raise FileNotFoundError(path)
        if content is None:
            raise SwiftError(f"the file {path} {damage}", path=path)
        if content["run_id"] != self.run_id:
            raise SwiftError(f"the file {path} belongs to run {content['run_id']}", path=path)
        return [entry_from_dict(data) for data in content["entries"]]

    def delete(self, span: Span) -> None:
        """Delete a file whose entries are in another one."""
        self.store.delete(f"{self.directory}/{span.name}")


class JournalArchiver:
    """Archives the journal as it grows, in the background. It delays and fails no run.

    One worker does it, the one that commits checkpoints; its replacement goes on where the archive ends. What
    cannot be written is tried again when there is more to write.

    Args:
        background: runs what waits for the store, one thing after the other.
        on_archived: called in the background with the position up to which all entries are archived.
    """

    def __init__(
        self,
        archive: JournalArchive,
        background: Executor,
        on_archived: Callable[[int], None] | None = None,
    ) -> None:
        self._archive = archive
        self._on_archived = on_archived
        self._background = background
        self._lock = threading.RLock()  # an executor may run at once what it is given
        self._entries: list[
            Entry
        ] = []  # of the file that still grows; guarded by the lock, as the next three
        self._open = False
        self._due = False
        self._interrupted = False
        self._seen: tuple[int, Phase, int | None] | None = None  # owner: the journal thread
        self._newest: Span | None = None  # the file that still grows; owner: the background, as the next two
        self._goes_on = False
        self._warned = False

    def on_entries(self, entries: Sequence[Entry]) -> None:
        """Keep entries until they are archived. Called in the journal thread."""
        with self._lock:
            self._entries += entries

    def on_snapshot(self, snapshot: JournalSnapshot) -> None:
        """Entries are missing from here on: they are archived. Called in the journal thread."""
        with self._lock:
            self._entries.clear()
            self._interrupted = True

    def start(self) -> None:
        """The store is this run's: archive what is there already."""
        with self._lock:
            self._open = True
        self._seal_soon()

    def close(self) -> None:
        """Begin no further file, since the process is about to end. Its agent archives what follows."""
        with self._lock:
            self._open = False

    def on_change(self, state: State) -> None:
        """Archive what is new when the phase changes and after a commit. Called in the journal thread.

        The end of the job is left to the agents: they are about to stop this worker.
        """
        now = (state.generation, state.phase, state.checkpoints.committed)
        if now != self._seen and state.phase != Phase.ENDED:
            self._seen = now
            self._seal_soon()

    def _seal_soon(self) -> None:
        with self._lock:
            if self._due or not self._open:
                return
            self._due = True
            try:
                self._background.submit(self._seal)
            except RuntimeError as error:  # this process ends: its agent archives the rest
                _logger.debug("%s", error, extra={"event": "archive_left_to_agent"})

    def _seal(self) -> None:
        with self._lock:
            self._due = False
        try:
            self._write()
        except Exception as error:
            if not self._warned:
                self._warned = True
                _logger.warning(
                    "The journal cannot be archived in %s now (%s): it is tried again as the run goes on.",
                    self._archive.store.url,
                    self._archive.store.redacted(first_line(error)),
                    extra={"event": "archive_failed"},
                )

    def _write(self) -> None:
        if not self._goes_on:
            self._forget_before(end_of(self._archive.spans()))
            self._goes_on = True
        with self._lock:
            entries = tuple(self._entries)
            if self._interrupted:  # the next file does not begin with what the last one has
                self._interrupted, self._newest = False, None
        if not entries or (self._newest is not None and self._newest.last == entries[-1].position):
            return
        earlier, self._newest = self._newest, self._archive.write(entries)
        if self._on_archived is not None:
            self._on_archived(self._newest.last + 1)
        if len(entries) >= _FULL:
            self._forget_before(self._newest.last + 1)
            self._newest = None
        if earlier is not None:
            self._archive.delete(earlier)

    def _forget_before(self, position: int) -> None:
        with self._lock:
            self._entries = [entry for entry in self._entries if entry.position >= position]
