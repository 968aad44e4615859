"""Reads messages by key from the segments of one or more workers, for a replay."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import torch
import xxhash

from swift_ft.errors import DivergenceError, LogCorruptError, LogMissingError, SwiftError
from swift_ft.logging.format.codec import unpack
from swift_ft.logging.format.record import (
    Direction,
    MessageKey,
    Record,
    RecordKind,
    bytes_to_fill,
    compare,
    copy_into,
    verify,
)
from swift_ft.logging.format.segment import SegmentName, format_segment_name, gaps, parse_segment_name
from swift_ft.logging.reading.prefetcher import Prefetcher
from swift_ft.logging.reading.segment_provider import FetchStats, Opened, PeerSources, SegmentProvider
from swift_ft.observe.spans import recorder
from swift_ft.storage.local_source import LocalSource
from swift_ft.storage.store import Store

_MESSAGES_AHEAD = 8
_SEGMENTS_AHEAD = 4
# A download keeps a core busy, and holds the interpreter: parallel downloads pay off on many cores only.
_FETCHES_AT_ONCE = max(1, min(_SEGMENTS_AHEAD, (os.cpu_count() or 1) // 2))
_READS_AT_ONCE = 2  # the disk has the next segment to read while the records of one are parsed


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A record and its place in the log.

    ``order`` is (generation, index of the directory, sequence, position in the segment), ``source`` the file.
    """

    order: tuple[int, int, int, int]
    path: str
    record: Record
    source: pa.NativeFile

    @property
    def directory(self) -> int:
        return self.order[1]


class LogReader:
    """Reads the log directories of one or more workers. Nothing is listed or read before :meth:`refresh`.

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
        # Committed, and not read yet or evicted.
        self._unread: dict[str, tuple[int, SegmentName]] = {}
        self._segment_prefetcher = Prefetcher[str, Opened](
            self._provider.open,
            _SEGMENTS_AHEAD,
            threads=_FETCHES_AT_ONCE if store.remote else _READS_AT_ONCE,
        )
        # One per directory, for packed messages.
        self._unpackers = [
            Prefetcher[_Copy, Record](partial(_unpacked, self._provider), _MESSAGES_AHEAD, threads=1)
            for _ in directories
        ]
        self._iteration = from_iteration - 1  # the one that is being read
        self._ranks: dict[int, int] = {}  # by directory: each has one writer at a time
        self._clear_index()

    def refresh(self) -> None:
        """Lists segments that were committed since the last call, and forgets deleted ones.

        They are prefetched in the order of their iterations. Payloads stay on the disk, and are verified when
        they are used.

        Raises:
            LogMissingError: a segment is missing between others.
            LogCorruptError: a segment was renamed.
        """
        present = self._committed()
        if not self._segments.keys() <= present.keys():
            self._segments = {path: copies for path, copies in self._segments.items() if path in present}
            self._clear_index()
            for copies in self._segments.values():
                self._index(copies)
            for unpacker in self._unpackers:
                unpacker.plan(())
        self._unread = {path: where for path, where in present.items() if path not in self._segments}
        self._prefetch_segments()

    def read_into(self, key: MessageKey, tensor: torch.Tensor, checksum: int | None = None) -> int:
        """Fills a tensor, such as a receive buffer, with a message, verified.

        Like a receive, this does not go through autograd. After an error the tensor's content is undefined.

        Args:
            key: its name.
            tensor: what to fill.
            checksum: a copy of the script's with this checksum counts before newer ones, if there is one.

        Returns:
            The checksum of the tensor's bytes.

        Raises:
            LogMissingError: it is in none of the directories.
            LogTornError, LogCorruptError, ForeignLogError: a segment of its iteration is damaged or another
                run's, or its payload does not match its checksum.
            DivergenceError: two copies of it differ, or the tensor's dtype or shape is not the message's.
        """
        with recorder.span("read the log", detail=True, iteration=key.iteration):
            copy = self._copy_of(key, checksum)
            self._read_into(copy, tensor)
            return copy.record.checksum

    def read(self, key: MessageKey) -> torch.Tensor:
        """A message in host memory, verified. Raises what :meth:`read_into` does."""
        with recorder.span("read the log", detail=True, iteration=key.iteration):
            copy = self._copy_of(key)
            tensor = torch.empty(copy.record.shape, dtype=getattr(torch, copy.record.dtype))
            self._read_into(copy, tensor)
            return tensor

    def _copy_of(self, key: MessageKey, checksum: int | None = None) -> _Copy:
        self._load_iteration(key.iteration)
        if copy := self._newest(self._messages, key, checksum):
            return copy
        where = ", ".join(self._directories)
        raise LogMissingError(
            f"{key} is not in the log ({self._store.url}: {where}): it was never sent, never committed, "
            "or dropped after a checkpoint",
            key=key,
            path=where,
        )

    def _read_into(self, copy: _Copy, tensor: torch.Tensor) -> None:
        if copy.record.key.iteration != self._iteration:
            self._begin_iteration(copy.record.key.iteration)
        if copy.record.codec:
            copy_into(self._unpackers[copy.directory].take(copy), tensor)
            return
        with bytes_to_fill(tensor, copy.record) as buffer:
            try:
                read_payload(copy.source, copy.record, buffer, path=copy.path)
            except LogCorruptError as damage:
                source, record = _second(self._provider, copy, damage)
                read_payload(source, record, buffer, path=copy.path)

    def receipt(self, key: MessageKey) -> int | None:
        """The checksum of the message as it was received; None if that is not known.

        Raises:
            DivergenceError: two receipts of it differ.
        """
        return self._checksum_in(self._receipts, key)

    def receipt_of_completed(self, key: MessageKey) -> int | None:
        """As :meth:`receipt`, where the log shows that the receiver has completed the iteration; else None.

        In that generation it goes on to later ones. A receiver that was interrupted in the iteration repeats
        it instead, and what it had got counts for nothing.
        """
        self._load_iteration(key.iteration)
        read = [(copies[0].directory, parse_segment_name(path)) for path, copies in self._segments.items()]
        completed = {
            (name.generation, directory)
            for directory, name in (*read, *self._unread.values())
            if name is not None and name.max_iteration > key.iteration
        }
        receipts = [copy for copy in self._receipts.get(key, ()) if copy.order[:2] in completed]
        return max(receipts, key=lambda copy: copy.order).record.checksum if receipts else None

    def checksums(self, key: MessageKey) -> set[int]:
        """Of all copies of the message itself: more than one only where a script sent what differs."""
        self._load_iteration(key.iteration)
        return {copy.record.checksum for copy in self._messages.get(key, ())}

    def checksum(self, key: MessageKey) -> int | None:
        """The checksum of the message itself, whose payload is not read; None if the log does not have it.

        Raises:
            DivergenceError: two copies of it differ.
        """
        return self._checksum_in(self._messages, key)

    def _checksum_in(self, index: dict[MessageKey, list[_Copy]], key: MessageKey) -> int | None:
        self._load_iteration(key.iteration)
        copy = self._newest(index, key)
        return copy.record.checksum if copy else None

    def has(self, key: MessageKey) -> bool:
        """True if the log has the message itself; a receipt does not count."""
        self._load_iteration(key.iteration)
        return key in self._messages

    def keys(self, iteration: int) -> list[MessageKey]:
        """Of all messages of an iteration, whose payloads are not read."""
        self._load_iteration(iteration)
        return list(self._keys.get(iteration, ()))

    def _begin_iteration(self, iteration: int) -> None:
        """Evicts what is past, and unpacks the packed messages of this iteration and the next in advance."""
        self._iteration = iteration
        self._evict_before(iteration)
        self._prefetch_segments()
        plans: list[list[_Copy]] = [[] for _ in self._directories]
        for index in (iteration, iteration + 1):
            for key in self._keys[index]:
                copy = max(self._messages[key], key=lambda copy: copy.order)
                if copy.record.codec:
                    plans[copy.directory].append(copy)
        for unpacker, plan in zip(self._unpackers, plans, strict=True):
            unpacker.plan(sorted(plan, key=lambda copy: copy.order))

    def _prefetch_segments(self) -> None:
        needed = {
            path: name for path, (_, name) in self._unread.items() if name.max_iteration >= self._iteration
        }
        self._segment_prefetcher.plan(sorted(needed, key=lambda path: needed[path].min_iteration))

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
            opened = self._segment_prefetcher.take(path)
        except FileNotFoundError:
            # Its writer has dropped it since it was listed. Reading one of its messages raises.
            return
        except Exception as error:
            raise self._unreadable(path, error) from error
        rank = opened.identity.rank
        if self._ranks.setdefault(directory, rank) != rank:
            raise LogCorruptError(
                f"{path} was written by worker {rank}, but other segments there by worker "
                f"{self._ranks[directory]}: it was moved here",
                path=path,
                key=None,
            )
        copies = [
            _Copy((name.generation, directory, name.sequence, position), path, record, opened.source)
            for position, record in enumerate(opened.records)
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

    def _newest(
        self, index: dict[MessageKey, list[_Copy]], key: MessageKey, checksum: int | None = None
    ) -> _Copy | None:
        copies = index.get(key)
        if not copies:
            return None
        of_script = key.direction == Direction.SCRIPT
        if of_script:
            copies = [copy for copy in copies if copy.record.checksum == checksum] or copies
        newest = max(copies, key=lambda copy: copy.order)
        if of_script:
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


def _unpacked(provider: SegmentProvider, copy: _Copy) -> Record:
    try:
        return read_unpacked(copy.source, copy.record, path=copy.path)
    except LogCorruptError as damage:
        return read_unpacked(*_second(provider, copy, damage), path=copy.path)


def _second(provider: SegmentProvider, copy: _Copy, damage: LogCorruptError) -> tuple[pa.NativeFile, Record]:
    opened = provider.open_again(copy.path, damage)
    return opened.source, opened.records[copy.order[-1]]


def _gap(names: Sequence[SegmentName], from_iteration: int) -> tuple[SegmentName, SegmentName] | None:
    """The first gap that matters. Segments are dropped in their order."""
    return next((gap for gap in gaps(names) if gap[1].min_iteration >= from_iteration), None)


def read_payload(source: pa.NativeFile, record: Record, buffer: memoryview, *, path: str) -> None:
    """Fill a buffer with a payload that is not packed.

    Args:
        source: the segment's file.
        record: one of its messages.
        buffer: as long as the payload.
        path: of the segment, for errors.

    Raises:
        LogCorruptError: the payload does not match its checksum, or its disk does not give it.
    """
    checksum = xxhash.xxh3_64()
    for piece in _pieces(source, record, buffer, path):
        checksum.update(piece)
    compare(record, checksum.intdigest(), path=path)


def read_unpacked(source: pa.NativeFile, record: Record, *, path: str) -> Record:
    """A message with its payload in memory, unpacked; arguments and errors as for :func:`read_payload`."""
    packed = memoryview(bytearray(record.payload.nbytes if record.payload else 0))
    for _ in _pieces(source, record, packed, path):
        pass
    unpacked = unpack(replace(record, payload=packed), path=path)
    verify(unpacked, path=path)
    return unpacked


def _pieces(source: pa.NativeFile, record: Record, buffer: memoryview, path: str) -> Iterator[memoryview]:
    payload = record.payload
    assert payload is not None  # a message has one
    if not isinstance(source, LocalSource):  # it is in memory
        buffer[:] = payload
        yield buffer
        return
    try:
        yield from source.read_into(payload, buffer)
    except OSError as error:
        raise LogCorruptError(
            f"the payload of {record.key} in {path} cannot be read: {error}", key=record.key, path=path
        ) from error
