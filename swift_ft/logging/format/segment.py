"""Log segments: Arrow IPC streams that plain pyarrow can read, one record batch per message.

    schema (with format version and identity as metadata) | batch | batch | ... | footer batch | end-of-stream
    mark

The footer counts the records and seals identity, keys, dtypes, shapes and checksums with one hash, so that a
flipped bit in any of them is seen when a segment is opened, without reading a payload. Payloads have
checksums of their own, which :func:`swift_ft.logging.format.record.verify` checks when a message is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pyarrow as pa

from swift_ft.errors import ForeignLogError, LogCorruptError, LogTornError, UsageError
from swift_ft.logging.format.encoding import (
    FORMAT_VERSION,
    SCHEMA,
    Footer,
    Seal,
    SegmentIdentity,
    batches,
    decode_all,
    encode,
    identity_of,
    schema_of,
)
from swift_ft.logging.format.record import Record
from swift_ft.storage.store import Store

__all__ = [
    "FORMAT_VERSION",
    "FRAMING_BYTES",
    "SCHEMA",
    "SegmentIdentity",
    "SegmentName",
    "SegmentWriter",
    "format_segment_name",
    "gaps",
    "open_segment",
    "parse_segment",
    "parse_segment_name",
    "read_segment",
]

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_DECODED_AT_ONCE = 256  # records
FRAMING_BYTES = 8192  # more than a record without its payload, and the footer
_NAME = re.compile(r"g(\d{5,})-s(\d{6,})-i(\d{8,})-(\d{8,})\.arrow")


@dataclass(frozen=True, order=True)
class SegmentName:
    """The content of a segment's file name: a reader can skip it unopened. Iterations are inclusive."""

    generation: int
    sequence: int
    min_iteration: int
    max_iteration: int


def format_segment_name(name: SegmentName) -> str:
    """The file name, such as ``g00001-s000042-i00000007-00000009.arrow``."""
    iterations = f"i{name.min_iteration:08d}-{name.max_iteration:08d}"
    return f"g{name.generation:05d}-s{name.sequence:06d}-{iterations}.arrow"


def parse_segment_name(path: str) -> SegmentName | None:
    """The content of a path's last part; None if that is not a segment's name."""
    match = _NAME.fullmatch(path.rpartition("/")[2])
    return SegmentName(*map(int, match.groups())) if match else None


def gaps(names: Sequence[SegmentName]) -> Iterator[tuple[SegmentName, SegmentName]]:
    """Neighbours between which segments are missing. A writer numbers its segments in each generation.

    Args:
        names: of one log directory, sorted.
    """
    for before, after in pairwise(names):
        if before.generation == after.generation and after.sequence > before.sequence + 1:
            yield before, after


class SegmentWriter:
    """Writes one segment. Not for use by several threads.

    Args:
        store: the store of the log.
        directory: the log's directory in the store.
        identity: goes into the schema's metadata.
        sequence: position of this segment among those of its generation in the directory.

    Attributes:
        records: how many were appended.
        min_iteration, max_iteration: of the records so far; None before the first.
        bytes_written: of the file so far, framing included.
    """

    def __init__(self, store: Store, directory: str, identity: SegmentIdentity, sequence: int) -> None:
        self._directory = directory
        self._identity = identity
        self._sequence = sequence
        self.records = 0
        self.min_iteration: int | None = None
        self.max_iteration: int | None = None
        self._seal = Seal(identity, sequence)
        self._file = store.open_write(f"{directory}/g{identity.generation:05d}-s{sequence:06d}")
        self._stream = pa.ipc.new_stream(self._file.sink, schema_of(identity, sequence))
        # Asked once for each record: to ask gives the interpreter up, and training may take it meanwhile.
        self.bytes_written = self._file.tell()

    def reserve(self, record: Record) -> None:
        """Reserves room on the disk for a record and the footer. Raises OSError if there is none."""
        size = (record.payload.nbytes if record.payload else 0) + FRAMING_BYTES
        self._file.reserve(size, written=self.bytes_written)

    def append(self, record: Record) -> None:
        """Writes one record. The payload is written without a copy."""
        self._stream.write_batch(encode(record))
        self.bytes_written = self._file.tell()
        self._seal.add(record)
        self.records += 1
        iteration = record.key.iteration
        if self.min_iteration is None or iteration < self.min_iteration:
            self.min_iteration = iteration
        if self.max_iteration is None or iteration > self.max_iteration:
            self.max_iteration = iteration

    def commit(self) -> str:
        """Writes the footer and gives the segment its name. May be tried again after an OSError.

        Returns:
            The path of the segment in the store.

        Raises:
            UsageError: nothing was appended, so the segment has no name.
        """
        if self.min_iteration is None or self.max_iteration is None:
            raise UsageError("a segment without records cannot be committed: abort() it")
        if not self._file.closed:  # else an earlier attempt failed to rename it
            self._stream.write_batch(encode(Footer(self.records, self._seal.value())))
            self._stream.close()
        name = SegmentName(self._identity.generation, self._sequence, self.min_iteration, self.max_iteration)
        path = self._file.commit(f"{self._directory}/{format_segment_name(name)}")
        self.bytes_written = self._file.tell()
        return path

    def abort(self) -> None:
        """Removes the unfinished segment. Does nothing after a commit."""
        self._file.abort()


def read_segment(store: Store, path: str, expected_run_id: str) -> list[Record]:
    """The records of :func:`open_segment`."""
    return open_segment(store, path, expected_run_id)[1]


def open_segment(store: Store, path: str, expected_run_id: str) -> tuple[SegmentIdentity, list[Record]]:
    """Reads a committed segment, as :func:`parse_segment` does. Raises FileNotFoundError if it is absent."""
    return parse_segment(store.open_read(path), path, expected_run_id)


def parse_segment(
    source: pa.NativeFile, path: str, expected_run_id: str | None
) -> tuple[SegmentIdentity, list[Record]]:
    """Reads a segment. Payloads stay in the file's memory map and are not verified yet.

    Args:
        source: the open file.
        path: its path in the store.
        expected_run_id: the run that it must belong to; None for any.

    Returns:
        Who wrote it, and all records.

    Raises:
        LogTornError: the file ends before its footer.
        LogCorruptError: Arrow cannot parse it, or its content does not match footer or name.
        ForeignLogError: it is intact, but belongs to another run.
    """
    size = source.size()
    records: list[Record] = []
    try:
        source.seek(max(0, size - len(_END_OF_STREAM)))
        ended = source.read() == _END_OF_STREAM
        source.seek(0)
        schema = pa.ipc.read_schema(source)
        identity, sequence = identity_of(schema)
        seal = Seal(identity, sequence)
        footer: Footer | None = None
        entries = _entries(source, schema, size - len(_END_OF_STREAM))
        for entry in entries:
            if isinstance(entry, Footer):
                footer = entry
                break
            records.append(entry)
            seal.add(entry)
        # Arrow accepts a file without its end mark as complete. Exactly that mark must follow the footer.
        closed = ended and next(entries, None) is None and source.tell() == size - len(_END_OF_STREAM)
    except Exception as error:  # damaged bytes cause all kinds of errors in Arrow and the decoders
        raise _damaged(path, records, torn=not ended or isinstance(error, EOFError), cause=error) from error
    if footer is None:
        raise _damaged(path, records, torn=True, cause="it has no footer")
    if not closed:
        raise _damaged(
            path, records, torn=not ended, cause="what follows the footer is not the end-of-stream mark"
        )
    if footer != Footer(len(records), seal.value()):
        raise _damaged(path, records, torn=False, cause="its footer does not match its records")
    _check_name(path, identity, sequence, records)
    if expected_run_id is not None and identity.run_id != expected_run_id:
        raise ForeignLogError(
            f"{path} belongs to run {identity.run_id!r}, not to {expected_run_id!r}: "
            "use another store, or empty this one",
            path=path,
            run_id=identity.run_id,
        )
    return identity, records


def _entries(source: pa.NativeFile, schema: pa.Schema, end: int) -> Iterator[Record | Footer]:
    """The records and the footer that the batches of a segment hold, one after the other.

    Args:
        source: the file, after its schema.
        end: where its end mark is.

    Raises:
        Exception: at the first thing that is none of a segment's, once all before it has been taken.
    """
    following = batches(source, schema)
    failure: Exception | None = None
    while failure is None and source.tell() < end:
        found: list[pa.RecordBatch] = []
        try:
            while len(found) < _DECODED_AT_ONCE and source.tell() < end:
                found.append(next(following))
        except Exception as error:  # damaged bytes cause all kinds of errors in Arrow
            failure = error
        yield from decode_all(found)
    if failure is not None:
        raise failure


def _check_name(path: str, identity: SegmentIdentity, sequence: int, records: list[Record]) -> None:
    # Readers skip segments by name, so a wrong name would hide messages.
    name = parse_segment_name(path)
    iterations = [record.key.iteration for record in records] or [-1]
    true_name = SegmentName(identity.generation, sequence, min(iterations), max(iterations))
    if name is not None and name != true_name:
        cause = f"it was renamed: its name does not match its content, {format_segment_name(true_name)}"
        raise _damaged(path, records, torn=False, cause=cause)


def _damaged(
    path: str, records: list[Record], *, torn: bool, cause: object
) -> LogTornError | LogCorruptError:
    key = records[-1].key if records else None
    last = f"after {len(records)} records, the last of them {key}" if records else "before its first record"
    if torn:
        return LogTornError(
            f"{path} ends {last} and has no footer: its writer or the disk stopped", path=path, key=key
        )
    return LogCorruptError(f"{path} is damaged {last}: {cause}", path=path, key=key)
