"""Reads messages by key from the segments of one or more workers, for a replay."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from swift_ft.errors import DivergenceError, LogCorruptError, LogMissingError, SwiftError
from swift_ft.logging.format.codec import unpack
from swift_ft.logging.format.record import Direction, MessageKey, Record, RecordKind, verify
from swift_ft.logging.format.segment import SegmentName, format_segment_name, gaps, parse_segment_name
from swift_ft.logging.reading.prefetcher import Prefetcher
from swift_ft.logging.reading.segment_provider import FetchStats, Opened, PeerSources, SegmentProvider
from swift_ft.spans import recorder
from swift_ft.storage.store import Store

__all__ = ["LogReader"]

_MESSAGES_AHEAD = 8
_SEGMENTS_AHEAD = 4
# A download keeps a core busy, and holds the interpreter: parallel downloads pay off on many cores only.
_FETCHES_AT_ONCE = max(1, min(_SEGMENTS_AHEAD, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A record and its place in the log.

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
    since a repeated iteration sends the same bytes again. The script's own communication need not.

    Args:
        store: the store of the logs.
        directories: the workers' log directories in the store.
        run_id: the run that all segments must belong to.
        since_generation: older generations' segments are not opened.
        from_iteration: segments that end before this iteration are not opened.
        peers: the living workers that wrote the logs; they are asked first. Their list of segments counts,
            even if the store does not have all of them yet.
        fetch_stats: counts bytes by origin.
    """

    def __init__(
        self,
        store: Store,
        directories: Sequence[str],
        *,
        run_id: str,
        since_generation: int = 0,
        from_iteration: int = 0,
        peers: PeerSources | None = None,
        fetch_stats: FetchStats | None = None,
    ) -> None:
        self._store = store
        self._provider = SegmentProvider(store, run_id, peers, fetch_stats)
        self._directories = tuple(directories)
        self._since_generation = since_generation
        self._from_iteration = from_iteration
        self._segments: dict[str, list[_Copy]] = {}
        # Committed but not read yet. Segments of a local store are read at once.
        self._unread: dict[str, tuple[int, SegmentName]] = {}
        self._segment_prefetcher = Prefetcher[str, Opened](
            self._provider.open, _SEGMENTS_AHEAD, threads=_FETCHES_AT_ONCE
        )
        # One per directory. Verifying a message reads all its bytes, and so loads them from the map.
        self._message_prefetchers = [
            Prefetcher[MessageKey, Record](self._newest_verified, _MESSAGES_AHEAD, threads=1)
            for _ in directories
        ]
        self._prefetched_iteration: int | None = None  # the iteration that is being read
        self._ranks: dict[int, int] = {}  # by directory: each has one writer at a time
        self._clear_index()

    def refresh(self) -> None:
        """Reads segments that were committed since the last call, and forgets deleted ones.

        Payloads are mapped, not loaded, and are verified on first use. Segments of a store behind a network
        are prefetched in the order of their iterations.

        Raises:
            LogMissingError: a segment is missing between others.
            LogTornError, LogCorruptError, ForeignLogError: in a segment that could matter. For a store behind
                a network they are raised when one of the segment's iterations is read.
        """
        present = self._committed()
        if not self._segments.keys() <= present.keys():
            self._segments = {path: copies for path, copies in self._segments.items() if path in present}
            self._clear_index()
            for copies in self._segments.values():
                self._index(copies)
            for prefetcher in self._message_prefetchers:
                prefetcher.plan(())
            self._prefetched_iteration = None
        self._unread = {path: where for path, where in present.items() if path not in self._segments}
        self._segment_prefetcher.plan(
            sorted(self._unread, key=lambda path: self._unread[path][1].min_iteration)
        )
        if not self._store.remote:
            self._load_if(lambda name: True)

    def message(self, key: MessageKey) -> Record:
        """A message with its payload, verified.

        Raises:
            LogMissingError: it is in none of the directories.
            LogCorruptError: its payload does not match its checksum.
            DivergenceError: two copies of it differ.
        """
        with recorder.span("read the log", detail=True, iteration=key.iteration):
            return self._message(key)

    def _message(self, key: MessageKey) -> Record:
        self._load_iteration(key.iteration)
        if key.iteration != self._prefetched_iteration:
            self._prefetch_messages(key.iteration)
        copy = self._newest(self._messages, key)
        if copy is None:
            where = ", ".join(self._directories)
            raise LogMissingError(
                f"{key} is not in the log ({self._store.url}: {where}): it was never sent, never committed, "
                "or dropped after a checkpoint",
                key=key,
                path=where,
            )
        return self._message_prefetchers[copy.directory].take(key)

    def receipt(self, key: MessageKey) -> int | None:
        """The checksum of the message as it was received; None if that is not known.

        Raises:
            DivergenceError: two receipts of it differ.
        """
        self._load_iteration(key.iteration)
        copy = self._newest(self._receipts, key)
        return copy.record.checksum if copy else None

    def has(self, key: MessageKey) -> bool:
        """True if the log has the message itself; a receipt does not count."""
        self._load_iteration(key.iteration)
        return key in self._messages

    def keys(self, iteration: int) -> list[MessageKey]:
        """Of all messages of an iteration, whose payloads are not read."""
        self._load_iteration(iteration)
        return list(self._keys.get(iteration, ()))

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
        self._load_iteration(iteration)
        copies = [
            self._newest(self._messages, key)
            for key in self._keys[iteration]
            if source_stage in (None, key.source_stage) and destination_stage in (None, key.destination_stage)
        ]
        ordered = sorted((copy for copy in copies if copy), key=lambda copy: copy.order)
        return [self._verified(copy) for copy in ordered]

    def _prefetch_messages(self, iteration: int) -> None:
        """Reads, unpacks and verifies the messages of this iteration and the next in advance."""
        self._prefetched_iteration = iteration
        if self._store.remote:
            self._evict_before(iteration)
        plans: list[list[_Copy]] = [[] for _ in self._directories]
        for index in (iteration, iteration + 1):
            for key in self._keys[index]:
                copy = max(self._messages[key], key=lambda copy: copy.order)
                plans[copy.directory].append(copy)
        for prefetcher, plan in zip(self._message_prefetchers, plans, strict=True):
            prefetcher.plan(copy.record.key for copy in sorted(plan, key=lambda copy: copy.order))

    def _evict_before(self, iteration: int) -> None:
        """Evicts past iterations, since a replay only moves forward. Reading one again fetches it again."""
        for path, copies in list(self._segments.items()):
            name = parse_segment_name(path)
            if name is None or name.max_iteration >= iteration:
                continue
            for copy in copies:
                key = copy.record.key
                index = self._receipts if copy.record.kind is RecordKind.RECEIPT else self._messages
                index[key] = [other for other in index[key] if other is not copy]
                if not index[key]:
                    del index[key]
            for past in range(name.min_iteration, name.max_iteration + 1):
                self._keys[past] = [key for key in self._keys[past] if key in self._messages]
            del self._segments[path]
            self._unread[path] = (copies[0].directory, name)

    def _newest_verified(self, key: MessageKey) -> Record:
        return self._verified(max(self._messages[key], key=lambda copy: copy.order))

    def _verified(self, copy: _Copy) -> Record:
        try:
            return _unpack_and_verify(copy)
        except LogCorruptError as damage:
            _, records = self._provider.open_again(copy.path, damage)
            return _unpack_and_verify(replace(copy, record=records[copy.order[-1]]))

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
            files = self._provider.list(folder)
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
        """The error for a store that does not answer after all retries: its messages count as missing."""
        if isinstance(error, SwiftError) or not self._store.may_pass(error):
            return error
        return LogMissingError(
            f"{self._store.url}/{path} cannot be read: {self._store.redacted(error)}", path=path, key=None
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

    def _load_iteration(self, iteration: int) -> None:
        self._load_if(lambda name: name.min_iteration <= iteration <= name.max_iteration)

    def _load_if(self, wanted: Callable[[SegmentName], bool]) -> None:
        for path, (directory, name) in list(self._unread.items()):
            if wanted(name):
                self._read(path, directory, name)
                del self._unread[path]

    def _read(self, path: str, directory: int, name: SegmentName) -> None:
        try:
            identity, records = self._segment_prefetcher.take(path)
        except FileNotFoundError:
            # Its writer has dropped it since it was listed. Reading one of its messages raises.
            return
        except Exception as error:
            raise self._unreadable(path, error) from error
        if self._ranks.setdefault(directory, identity.rank) != identity.rank:
            raise LogCorruptError(
                f"{path} was written by worker {identity.rank}, but other segments there by worker "
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
            if copy.record.kind is RecordKind.RECEIPT:
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
        if key.direction == Direction.SCRIPT:
            return newest  # a script may send what differs each time: how long an iteration took, say
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


def _unpack_and_verify(copy: _Copy) -> Record:
    record = unpack(copy.record, path=copy.path)
    verify(record, path=copy.path)
    return record


def _gap(names: Sequence[SegmentName], from_iteration: int) -> tuple[SegmentName, SegmentName] | None:
    """The first gap that matters. Segments are dropped in their order."""
    return next((gap for gap in gaps(names) if gap[1].min_iteration >= from_iteration), None)
