"""The journal of a run, read from its archive: what happened, also when the job is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swift_ft.coordination.archive import JournalArchive, Span
from swift_ft.errors import SwiftError, first_line
from swift_ft.offline.journal_gaps import Gap, Later, find_gaps, what_followed
from swift_ft.offline.run_store import store_errors
from swift_ft.recovery.entries import Entry
from swift_ft.recovery.history import History, StateChange
from swift_ft.recovery.job_state import State, Verdict
from swift_ft.storage.read_only import read_at_once
from swift_ft.storage.store import Store

_LISTINGS = 5
"""A run that is alive replaces files now and then, so that one that was listed is gone."""


@dataclass(frozen=True)
class ArchivedJournal:
    """The content of a run's archive.

    Attributes:
        run_id: the run.
        entries: of its journal, by position. Some are missing where ``gaps`` says so.
        damages: of files, one line each.
    """

    run_id: str
    entries: tuple[Entry, ...]
    damages: tuple[str, ...] = ()

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The gaps in the entries."""
        return tuple(find_gaps(self.entries))

    @property
    def problems(self) -> tuple[str, ...]:
        """Damaged and missing things, and the facts that are unknown for that, one line each."""
        gaps = self.gaps
        unknown = [
            f"{gap}: who joined, who was lost, and how the run recovered then is unknown" for gap in gaps
        ]
        return (*self.damages, *unknown)

    @property
    def shortcomings(self) -> tuple[str, ...]:
        """The problems, one of which may be that there is no journal."""
        if self.entries:
            return self.problems
        return ("the journal of this run is not archived: its session never began", *self.problems)

    def after_gaps(self) -> Later | None:
        """Facts of the time after the first gap; None if there is no gap."""
        gaps = self.gaps
        if not gaps:
            return None
        return what_followed(self.last_state(), [e for e in self.entries if e.position > gaps[0].last])

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the run; None if no end is archived."""
        later = self.after_gaps()
        return later.verdict if later is not None else self.last_state().verdict

    @cached_property
    def history(self) -> History:
        """The history up to the first gap."""
        return History.of(self._known())

    def changes(self) -> Iterator[StateChange]:
        """Each entry with the states before and after it, up to the first gap."""
        return map(History().apply, self._known())

    def last_state(self) -> State:
        """The state after the last entry before a gap."""
        return self.history.state

    def _known(self) -> Iterator[Entry]:
        for position, entry in enumerate(self.entries):
            if entry.position != position:
                return
            yield entry

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        entries = [entry.to_dict() for entry in self.entries]
        return {"run_id": self.run_id, "entries": entries, "problems": list(self.problems)}


def read_journal(
    store: Store, run_id: str, on_file: Callable[[int], None] = lambda count: None
) -> ArchivedJournal:
    """Read what is archived of a run's journal. What is damaged or missing is named, and left out.

    Args:
        run_id: the run.
        on_file: called with the number of files that were read since the last call, by any thread.

    Raises:
        UsageError: the store cannot be read.
    """
    archive = JournalArchive(store, run_id)
    found: dict[int, Entry] = {}
    problems: list[str] = []
    with store_errors(store):
        for _ in range(_LISTINGS):
            found, problems, gone = _read_all(archive, on_file)
            if not gone:
                break
    return ArchivedJournal(run_id, tuple(found[position] for position in sorted(found)), tuple(problems))


def _read_all(
    archive: JournalArchive, on_file: Callable[[int], None]
) -> tuple[dict[int, Entry], list[str], bool]:
    """All entries by position, what is damaged, and whether a file went away while they were read."""
    spans = archive.spans()
    needed = _outermost(spans)
    found: dict[int, Entry] = {}
    problems: list[str] = []
    read = read_at_once(lambda span: _read(archive, span, on_file), needed)
    for result in read:
        if isinstance(result, str):
            problems.append(result)
        else:
            found.update((entry.position, entry) for entry in result or ())
    if problems:  # what a damaged file held may be in a smaller one as well
        for span in spans:
            smaller = _read(archive, span, on_file) if span not in needed else None
            if isinstance(smaller, list):
                found.update((entry.position, entry) for entry in smaller)
    return found, problems, None in read


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """The spans that lie in no other one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        if not found or span.last > found[-1].last:
            found.append(span)
    return found


def _read(archive: JournalArchive, span: Span, on_file: Callable[[int], None]) -> list[Entry] | str | None:
    """The entries of a file; what is wrong with it; or None if it is gone."""
    try:
        return archive.read(span)
    except FileNotFoundError:
        return None
    except SwiftError as error:
        return first_line(error)
    finally:
        on_file(1)
