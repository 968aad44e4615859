"""Reads all log segments of a store, in threads, and verifies every payload."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa

from swift_ft.errors import LogCorruptError, LogTornError, first_line
from swift_ft.logging.format.codec import unpack
from swift_ft.logging.format.record import Record, verify
from swift_ft.logging.format.segment import (
    SegmentIdentity,
    SegmentName,
    format_segment_name,
    gaps,
    parse_segment,
    parse_segment_name,
)
from swift_ft.observe.waits import waiting
from swift_ft.offline.replay_coverage import Entry, ReplayCoverage
from swift_ft.storage.store import TEMPORARY_SUFFIX, Store

_LOADED_BYTES = 1 << 30  # a larger segment gets a file of its own, if it is behind a network


def read_ahead_threads(store: Store) -> int:
    """The number of files to read at once: hashing keeps cores busy, a network wants several requests."""
    cores = os.cpu_count() or 1
    return max(8, cores) if store.remote else cores


@dataclass(frozen=True, slots=True)
class LogDamage:
    """Something in a log that is not what its writer left.

    Attributes:
        what: is wrong, in words.
        rank: whose log it is.
        iterations: the first and the last that it concerns.
        blocks: no replay that needs the log from these iterations on can read it at all. Otherwise only some
            messages are lost.
    """

    path: str
    what: str
    rank: int
    iterations: tuple[int, int]
    blocks: bool


@dataclass(slots=True)
class CheckedLogs:
    """The content of all logs of a store.

    Attributes:
        coverage: the messages in them.
        damages: what is wrong, segment by segment.
        notes: what is not damage, and no part of the newest run's logs either: by path, what it is.
        unsealed: workers with an open segment, whose end no reader sees yet.
        segments: how many were read.
        messages: how many payloads were verified.
    """

    coverage: ReplayCoverage = field(default_factory=ReplayCoverage)
    damages: list[LogDamage] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    unsealed: set[int] = field(default_factory=set)
    segments: int = 0
    messages: int = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    path: str
    rank: int
    name: SegmentName
    size: int


def check_logs(
    store: Store,
    files: Mapping[str, int],
    *,
    run_id: str,
    earlier: Iterable[str],
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CheckedLogs:
    """Verify all segments: their seals and names, their payloads, and that none is missing between two.

    At most one segment per thread is in memory.

    Args:
        store: where they are.
        files: bytes of all files in the store's log folder, by path.
        run_id: the run whose logs these should be.
        earlier: the runs that it continued. What they left is not damage.
        on_bytes: called with the bytes of each segment that was read, in any thread.

    Raises:
        Exception: what the store's client raised, if it does not answer.
    """
    found = CheckedLogs()
    segments = sorted(_named(files, found), key=lambda segment: (segment.name.min_iteration, segment.path))
    reader = _Reader(store, run_id, frozenset(earlier), on_bytes)
    foreign: set[str] = set()
    threads = read_ahead_threads(store)
    with ThreadPoolExecutor(threads, "swift_ft verify") as pool:
        pending: deque[tuple[_Segment, Future[_Content]]] = deque()
        upcoming = iter(segments)
        for segment in upcoming:
            pending.append((segment, pool.submit(reader.read, segment)))
            if len(pending) > threads:
                _take(found, pending, foreign)
        while pending:
            _take(found, pending, foreign)
    found.coverage.compare_before(float("inf"))
    for rank, own in groupby(sorted(segments, key=lambda s: (s.rank, s.name)), lambda s: s.rank):
        found.damages += _gaps(rank, [segment for segment in own if segment.path not in foreign])
    return found


def _named(files: Mapping[str, int], found: CheckedLogs) -> Iterator[_Segment]:
    """The segments among all files of the log folder; the others are named as what they are."""
    for path, size in files.items():
        directory, _, file = path.rpartition("/")
        number = directory.rpartition("/rank-")[2]
        rank = int(number) if number.isdigit() else -1
        name = parse_segment_name(file)
        if file.endswith(TEMPORARY_SUFFIX):
            found.notes[path] = "a segment that is being written, or whose writer was killed"
            found.unsealed.add(rank)
        elif rank < 0 or not file.endswith(".arrow"):
            found.notes[path] = "no file of the log"
        elif name is None or format_segment_name(name) != file:
            what = "it is not named like a segment: it was renamed, and no replay can read the log"
            found.damages.append(LogDamage(path, what, rank, (0, 0), blocks=True))
        else:
            yield _Segment(path, rank, name, size)


@dataclass(frozen=True, slots=True)
class _Content:
    """The result of reading a segment. ``note`` says why it is none of this run's, if so."""

    entries: tuple[Entry, ...] = ()
    damages: tuple[LogDamage, ...] = ()
    note: str = ""


def _take(found: CheckedLogs, pending: deque[tuple[_Segment, Future[_Content]]], foreign: set[str]) -> None:
    segment, future = pending.popleft()
    with waiting(f"{segment.path} to be read"):
        content = future.result()
    # The others begin no earlier than this one.
    found.coverage.compare_before(segment.name.min_iteration)
    if content.note:
        found.notes[segment.path] = content.note
        foreign.add(segment.path)
        return
    found.segments += 1
    found.damages += content.damages
    found.coverage.add(segment.rank, content.entries)
    found.coverage.reaches(segment.rank, segment.name.max_iteration)
    found.messages += sum(entry.intact and entry.is_message for entry in content.entries)


class _Reader:
    """Reads segments. Any number of threads may use it."""

    def __init__(
        self, store: Store, run_id: str, earlier: frozenset[str], on_bytes: Callable[[int], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._earlier = earlier
        self._on_bytes = on_bytes

    def read(self, segment: _Segment) -> _Content:
        """Read a segment and verify all that is in it."""
        try:
            identity, records = parse_segment(self._load(segment), segment.path, None)
        except (LogTornError, LogCorruptError) as error:
            return _damaged(segment, first_line(error).removeprefix(f"{segment.path} "))
        except FileNotFoundError:
            self._store.check_anchor()
            return _Content(note="deleted while the store was verified")
        except OSError as error:
            if self._store.remote:  # it does not answer
                raise
            return _damaged(segment, f"it cannot be read ({self._store.redacted(error)})")
        if identity.run_id != self._run_id:
            return self._foreign(segment, identity)
        if identity.rank != segment.rank:
            return _damaged(segment, f"worker {identity.rank} wrote it: it was moved here")
        return _verified(segment, records)

    def _load(self, segment: _Segment) -> pa.NativeFile:
        self._on_bytes(segment.size)
        if segment.size > _LOADED_BYTES:
            return self._store.open_read(segment.path)
        pieces = self._store.read_pieces(segment.path, max(1, segment.size))
        return pa.BufferReader(pa.py_buffer(next(pieces, memoryview(b""))))

    def _foreign(self, segment: _Segment, identity: SegmentIdentity) -> _Content:
        if identity.run_id in self._earlier:
            return _Content(note=f"of run {identity.run_id}, which this one continued")
        return _damaged(segment, f"it belongs to run {identity.run_id!r}, which this one did not continue")


def _damaged(segment: _Segment, what: str) -> _Content:
    iterations = segment.name.min_iteration, segment.name.max_iteration
    return _Content(damages=(LogDamage(segment.path, what, segment.rank, iterations, blocks=True),))


def _verified(segment: _Segment, records: Iterable[Record]) -> _Content:
    entries, damages = [], []
    for position, record in enumerate(records):
        if what := payload_damage(record):
            iterations = record.key.iteration, record.key.iteration
            damages.append(LogDamage(segment.path, what, segment.rank, iterations, blocks=False))
        order = segment.name.generation, segment.name.sequence, position
        entries.append(Entry(record.kind, record.key, record.checksum, not what, segment.path, order))
    return _Content(tuple(entries), tuple(damages))


def payload_damage(record: Record) -> str:
    """The damage of a record's payload; empty if it matches its checksum."""
    try:
        verify(unpack(record))
    except LogCorruptError as error:
        return first_line(error)
    return ""


def _gaps(rank: int, segments: list[_Segment]) -> Iterator[LogDamage]:
    for before, after in gaps([segment.name for segment in segments]):
        first = f"log/rank-{rank:05d}/g{after.generation:05d}-s{before.sequence + 1:06d}"
        count = after.sequence - before.sequence - 1
        what = (
            f"{count} segments are missing before {format_segment_name(after)}"
            if count > 1
            else f"the segment before {format_segment_name(after)} is missing"
        )
        yield LogDamage(first, what, rank, (before.max_iteration, after.min_iteration), blocks=True)
