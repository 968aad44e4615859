"""The log as a replay sees it: messages by key, out of the segments of one or more workers."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from swift_ft.errors import DivergenceError, LogCorruptError, LogMissingError, SwiftError
from swift_ft.logging.ahead import ReadAhead
from swift_ft.logging.codec import unpack
from swift_ft.logging.record import Kind, MessageKey, Record, verify
from swift_ft.logging.retry import is_transient
from swift_ft.logging.segment import SegmentName, format_segment_name, parse_segment_name
from swift_ft.logging.sources import Fetched, Opened, Peers, Sources
from swift_ft.logging.store import Store

__all__ = ["LogReader"]

_MESSAGES_AHEAD = 8
_SEGMENTS_AHEAD = 4
# A download keeps a core busy, in this process's one interpreter: several at once pay where there are many.
_FETCHES_AT_ONCE = max(1, min(_SEGMENTS_AHEAD, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A record and where it stands.

    ``order`` is (generation, index of the directory, sequence, position in the segment).
    """

    order: tuple[int, int, int, int]
    path: str
    record: Record

    @property
    def directory(self) -> int:
        return self.order[1]


class LogReader:
    """Reads the log directories of one or more workers. Nothing is read before :meth:`refresh`.

    Of several copies of a message the one of the newest generation counts; all must have the same checksum,
    since a repeated iteration sends the same bytes again.

    Args:
        store: where.
        directories: the workers' log directories in the store.
        run_id: the run that all segments must belong to.
        since_generation: older generations' segments are not opened.
        from_iteration: segments that end before this iteration are not opened.
        peers: the workers that wrote the logs, where they live and are asked first; a log of theirs is what
            they say, even where the store does not have all of it yet.
        fetched: is told how many bytes came from where.
    """

    def __init__(
        self,
        store: Store,
        directories: Sequence[str],
        *,
        run_id: str,
        since_generation: int = 0,
        from_iteration: int = 0,
        peers: Peers | None = None,
        fetched: Fetched | None = None,
    ) -> None:
        self._store = store
        self._sources = Sources(store, run_id, peers, fetched)
        self._directories = tuple(directories)
        self._since_generation = since_generation
        self._from_iteration = from_iteration
        self._segments: dict[str, list[_Copy]] = {}
        # Committed, and on their way to this machine; those of a store that needs no way are read at once.
        self._unread: dict[str, tuple[int, SegmentName]] = {}
        self._ahead = ReadAhead[str, Opened](self._sources.open, _SEGMENTS_AHEAD, threads=_FETCHES_AT_ONCE)
        # By directory: who sent a message first is asked for it first. Touching all bytes brings them here.
        self._checked = [
            ReadAhead[MessageKey, Record](self._check, _MESSAGES_AHEAD, threads=1) for _ in directories
        ]
        self._checked_from: int | None = None  # the iteration that is being asked for
        self._ranks: dict[int, int] = {}  # by directory: each has one writer at a time
        self._clear_index()

    def refresh(self) -> None:
        """Reads segments that were committed since the last call, and forgets those that were deleted.

        Payloads are mapped, not loaded, and verified when they are asked for. Segments of a store behind a
        network are fetched in the order of their iterations, ahead of who asks for one of them.

        Raises:
            LogMissingError: a segment is missing between others.
            LogTornError, LogCorruptError, ForeignLogError: in a segment that could matter. Of a store behind
                a network they are raised when one of the segment's iterations is asked for.
        """
        present = self._committed()
        if not self._segments.keys() <= present.keys():
            self._segments = {path: copies for path, copies in self._segments.items() if path in present}
            self._clear_index()
            for copies in self._segments.values():
                self._index(copies)
            for ahead in self._checked:
                ahead.plan(())
            self._checked_from = None
        self._unread = {path: where for path, where in present.items() if path not in self._segments}
        self._ahead.plan(sorted(self._unread, key=lambda path: self._unread[path][1].min_iteration))
        if not self._store.remote:
            self._read_if(lambda name: True)

    def message(self, key: MessageKey) -> Record:
        """A message with its payload, verified.

        Raises:
            LogMissingError: it is in none of the directories.
            LogCorruptError: its payload does not match its checksum.
            DivergenceError: two copies of it differ.
        """
        self._want(key.iteration)
        if key.iteration != self._checked_from:
            self._check_ahead(key.iteration)
        copy = self._newest(self._messages, key)
        if copy is None:
            where = ", ".join(self._directories)
            raise LogMissingError(
                f"{key} is not in the log ({self._store.url}: {where}): it was never sent, never committed, "
                "or dropped after a checkpoint",
                key=key,
                path=where,
            )
        return self._checked[copy.directory].take(key)

    def receipt(self, key: MessageKey) -> int | None:
        """The checksum of what a receiver got; None if that is not known.

        Raises:
            DivergenceError: two receipts of it differ.
        """
        self._want(key.iteration)
        copy = self._newest(self._receipts, key)
        return copy.record.checksum if copy else None

    def has(self, key: MessageKey) -> bool:
        """True if the log has the message itself; a receipt does not count."""
        self._want(key.iteration)
        return key in self._messages

    def messages(
        self, iteration: int, source_stage: int | None = None, destination_stage: int | None = None
    ) -> list[Record]:
        """All messages of an iteration, verified, each once, in the order in which they were logged.

        Args:
            iteration: optimizer step.
            source_stage: only those that this stage sent.
            destination_stage: only those that were sent to this stage.

        Returns:
            The newest generation's copies. Where generations or directories mix, these come one after the
            other.

        Raises:
            LogCorruptError, DivergenceError: as for :meth:`message`.
        """
        self._want(iteration)
        copies = [
            self._newest(self._messages, key)
            for key in self._keys[iteration]
            if source_stage in (None, key.source_stage) and destination_stage in (None, key.destination_stage)
        ]
        ordered = sorted((copy for copy in copies if copy), key=lambda copy: copy.order)
        return [self._verified(copy) for copy in ordered]

    def _check_ahead(self, iteration: int) -> None:
        """Read, unpack and verify an iteration's messages, and the next one's, before they are asked for."""
        self._checked_from = iteration
        if self._store.remote:
            self._let_go_before(iteration)
        plans: list[list[_Copy]] = [[] for _ in self._directories]
        for index in (iteration, iteration + 1):
            for key in self._keys[index]:
                copy = max(self._messages[key], key=lambda copy: copy.order)
                plans[copy.directory].append(copy)
        for ahead, plan in zip(self._checked, plans, strict=True):
            ahead.plan(copy.record.key for copy in sorted(plan, key=lambda copy: copy.order))

    def _let_go_before(self, iteration: int) -> None:
        """A replay goes on only: what was fetched for it is fetched again if somebody should ask."""
        for path, copies in list(self._segments.items()):
            name = parse_segment_name(path)
            if name is None or name.max_iteration >= iteration:
                continue
            for copy in copies:
                key = copy.record.key
                index = self._receipts if copy.record.kind is Kind.RECEIPT else self._messages
                index[key] = [other for other in index[key] if other is not copy]
                if not index[key]:
                    del index[key]
            for past in range(name.min_iteration, name.max_iteration + 1):
                self._keys[past] = [key for key in self._keys[past] if key in self._messages]
            del self._segments[path]
            self._unread[path] = (copies[0].directory, name)

    def _check(self, key: MessageKey) -> Record:
        return self._verified(max(self._messages[key], key=lambda copy: copy.order))

    def _verified(self, copy: _Copy) -> Record:
        try:
            return _checked(copy)
        except LogCorruptError as damage:
            _, records = self._sources.open_again(copy.path, damage)
            return _checked(replace(copy, record=records[copy.order[-1]]))

    def _committed(self) -> dict[str, tuple[int, SegmentName]]:
        """Path -> (index of the directory, parsed name) of every segment that could matter."""
        found = {}
        for directory, folder in enumerate(self._directories):
            names = self._names(folder)
            if _gap(names, self._from_iteration):
                names = self._names(folder)  # its writer may have dropped segments while they were listed
            if gap := _gap(names, self._from_iteration):
                raise self._missing(folder, *gap)
            for name in names:
                if name.max_iteration >= self._from_iteration:
                    found[f"{folder}/{format_segment_name(name)}"] = (directory, name)
        return found

    def _names(self, folder: str) -> list[SegmentName]:
        """All segments of the generations that count, in the order in which they were written."""
        try:
            files = self._sources.list(folder)
        except Exception as error:
            raise self._unreadable(folder, error) from error
        names = []
        for file in files:
            if not file.endswith(".arrow"):
                continue
            name = parse_segment_name(file)
            if name is None or format_segment_name(name) != file:
                path = f"{folder}/{file}"
                raise LogCorruptError(
                    f"{path} is not named like a segment: it was renamed", path=path, key=None
                )
            if name.generation >= self._since_generation:
                names.append(name)
        return sorted(names)

    def _unreadable(self, path: str, error: Exception) -> Exception:
        """A store that does not answer has no messages, after all its patience."""
        if not (self._store.remote and is_transient(error)) or isinstance(error, SwiftError):
            return error
        return LogMissingError(
            f"{self._store.url}/{path} cannot be read: {self._store.shown(error)}", path=path, key=None
        )

    def _missing(self, folder: str, before: SegmentName, after: SegmentName) -> LogMissingError:
        first = f"{folder}/g{after.generation:05d}-s{before.sequence + 1:06d}"
        return LogMissingError(
            f"{after.sequence - before.sequence - 1} segments are missing in {self._store.url}, {first} and "
            f"those up to {after.sequence:06d}: they held messages of iterations {before.max_iteration} to "
            f"{after.min_iteration}",
            path=first,
            key=None,
        )

    def _want(self, iteration: int) -> None:
        self._read_if(lambda name: name.min_iteration <= iteration <= name.max_iteration)

    def _read_if(self, wanted: Callable[[SegmentName], bool]) -> None:
        for path, (directory, name) in list(self._unread.items()):
            if wanted(name):
                self._read(path, directory, name)
                del self._unread[path]

    def _read(self, path: str, directory: int, name: SegmentName) -> None:
        try:
            identity, records = self._ahead.take(path)
        except FileNotFoundError:
            # Dropped by its writer since it was listed. Who asks for one of its messages is told.
            return
        except Exception as error:
            raise self._unreadable(path, error) from error
        if self._ranks.setdefault(directory, identity.rank) != identity.rank:
            raise LogCorruptError(
                f"{path} was written by worker {identity.rank}, and others beside it by worker "
                f"{self._ranks[directory]}: it was moved here",
                path=path,
                key=None,
            )
        copies = [
            _Copy((name.generation, directory, name.sequence, position), path, record)
            for position, record in enumerate(records)
        ]
        self._segments[path] = copies
        self._index(copies)

    def _clear_index(self) -> None:
        self._messages: dict[MessageKey, list[_Copy]] = {}
        self._receipts: dict[MessageKey, list[_Copy]] = {}
        self._keys: dict[int, list[MessageKey]] = defaultdict(list)  # of messages, by iteration

    def _index(self, copies: list[_Copy]) -> None:
        for copy in copies:
            key = copy.record.key
            if copy.record.kind is Kind.RECEIPT:
                self._receipts.setdefault(key, []).append(copy)
            else:
                if key not in self._messages:
                    self._keys[key.iteration].append(key)
                self._messages.setdefault(key, []).append(copy)

    def _newest(self, index: dict[MessageKey, list[_Copy]], key: MessageKey) -> _Copy | None:
        copies = index.get(key)
        if not copies:
            return None
        newest = max(copies, key=lambda copy: copy.order)
        for other in copies:
            if other.record.checksum != newest.record.checksum:
                raise DivergenceError(
                    f"two copies of {key} differ: {other.path} and {newest.path}. "
                    "The iteration was repeated and did not send the same bytes",
                    key=key,
                    path=newest.path,
                    other_path=other.path,
                )
        return newest


def _checked(copy: _Copy) -> Record:
    record = unpack(copy.record, path=copy.path)
    verify(record, path=copy.path)
    return record


def _gap(names: Sequence[SegmentName], from_iteration: int) -> tuple[SegmentName, SegmentName] | None:
    """Two neighbours between which segments are missing. They are numbered, and dropped from the first on."""
    for before, after in pairwise(names):
        consecutive = after.sequence <= before.sequence + 1
        if (
            before.generation == after.generation
            and not consecutive
            and after.min_iteration >= from_iteration
        ):
            return before, after
    return None
