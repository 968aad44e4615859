"""A log directory as its one writer sees it: the open segment, those before it, and what is dropped."""

from __future__ import annotations

from collections.abc import Callable

from swift_ft.logging.record import Record
from swift_ft.logging.retry import lacks_room, patiently
from swift_ft.logging.segment import SegmentIdentity, SegmentName, SegmentWriter, parse_segment_name
from swift_ft.logging.shipping import Shipper
from swift_ft.logging.store import Store

__all__ = ["SegmentRotation", "drop_segments"]


class SegmentRotation:
    """Writes records into one segment after the other. Not for use by several threads.

    Temporary files that a dead writer left in the directory are deleted, and the sequence continues after the
    generation's segments that are there.

    Args:
        store: where.
        directory: the log's directory in the store.
        identity: goes into every segment.
        segment_bytes: a segment is closed when it is as large as this.
        shipper: brings the segments to the store, where they are written to the local disk first.
        patience_s: how long a full disk, or one that may not be written, is waited for.

    Attributes:
        segments: committed by this writer.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        identity: SegmentIdentity,
        segment_bytes: int,
        *,
        shipper: Shipper | None = None,
        patience_s: float = 0.0,
    ) -> None:
        self._store = shipper.local if shipper else store
        self._shipper = shipper
        self._patience_s = patience_s
        self._directory = directory
        self._identity = identity
        self._segment_bytes = segment_bytes
        self._open: SegmentWriter | None = None
        self._committed_bytes = 0
        self.segments = 0
        store.sweep(directory)
        names = map(parse_segment_name, store.list(directory))
        taken = [name.sequence for name in names if name and name.generation == identity.generation]
        self._sequence = max(taken, default=-1) + 1

    @property
    def bytes_written(self) -> int:
        """Bytes of all segments, framing included, the open one so far."""
        return self._committed_bytes + (self._open.bytes_written if self._open else 0)

    def write(self, record: Record) -> None:
        """Appends a record, to a new segment where none is open.

        There is room for all of it before its first byte is written: a full disk can be waited for between
        two records, but not in the middle of one.
        """
        patiently(lambda: self._with_room(record), self._patience_s, lacks_room).append(record)

    def _with_room(self, record: Record) -> SegmentWriter:
        if self._open is None:
            self._open = SegmentWriter(self._store, self._directory, self._identity, self._sequence)
        self._open.reserve(record)
        return self._open

    def cut_if_full(self) -> None:
        """Commits the open segment if it has reached its size."""
        if self._open is not None and self._open.bytes_written >= self._segment_bytes:
            self.cut()

    def cut(self) -> None:
        """Commits the open segment, if there is one."""
        if self._open is None:
            return
        path = patiently(self._open.commit, self._patience_s, lacks_room)
        if self._shipper:
            self._shipper.offer(path)
        self._committed_bytes += self._open.bytes_written
        self._open = None
        self._sequence += 1
        self.segments += 1

    def abort(self) -> None:
        """Removes the open segment, if there is one."""
        if self._open is not None:
            self._open.abort()


def drop_segments(store: Store, directory: str, unwanted: Callable[[SegmentName], bool]) -> list[str]:
    """Deletes the committed segments whose name says that they are unwanted.

    Returns:
        The names of the deleted files.
    """
    dropped = []
    for file in store.list(directory):
        name = parse_segment_name(file)
        if name and unwanted(name):
            store.delete(f"{directory}/{file}")
            dropped.append(file)
    return dropped
