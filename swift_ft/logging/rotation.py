"""A log directory as its one writer sees it: the open segment, those before it, and what is dropped."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from swift_ft.logging.disk import DiskUse
from swift_ft.logging.options import LogOptions
from swift_ft.logging.record import Record
from swift_ft.logging.retry import lacks_room, patiently
from swift_ft.logging.segment import (
    FRAMING_BYTES,
    SegmentIdentity,
    SegmentName,
    SegmentWriter,
    parse_segment_name,
)
from swift_ft.logging.shipping import LogTimeoutError, Shipper
from swift_ft.logging.store import Store

__all__ = ["SegmentRotation"]


class SegmentRotation:
    """Writes records into one segment after the other. Not for use by several threads.

    Temporary files that a dead writer left in the directory are deleted, and the sequence continues after the
    generation's segments that are there.

    Args:
        store: where.
        directory: the log's directory in the store.
        identity: goes into every segment.
        options: how large a segment gets, and how long a full disk, or one that must not be written, is
            waited for.
        disk: what the segments may take; the shipper's, where there is one.
        shipper: brings the segments to the store, where they are written to the local disk first.

    Attributes:
        segments: committed by this writer.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        identity: SegmentIdentity,
        options: LogOptions,
        *,
        disk: DiskUse,
        shipper: Shipper | None = None,
    ) -> None:
        self._shared = store
        self._store = shipper.local if shipper else store
        self._shipper = shipper
        self._disk = disk
        self._patience_s = options.stall_timeout_s
        self._directory = directory
        self._identity = identity
        self._segment_bytes = options.segment_bytes
        self._open: SegmentWriter | None = None
        self._committed_bytes = 0
        self.segments = 0
        if shipper:
            files = shipper.names()
        else:
            store.sweep(directory)
            files = store.list(directory)
            if disk.budget_bytes is not None:
                for file in files:
                    if parse_segment_name(file):
                        disk.add(f"{directory}/{file}", store.size(f"{directory}/{file}"))
        names = map(parse_segment_name, files)
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
        self._keep_to_budget((record.payload.nbytes if record.payload else 0) + FRAMING_BYTES)
        patiently(lambda: self._with_room(record), self._patience_s, lacks_room).append(record)
        self._disk.grow(self._open.bytes_written if self._open else 0)

    def _keep_to_budget(self, size: int) -> None:
        if self._disk.wait_until_fits(size, 0.0):
            return
        self.cut()  # what is open could neither be shipped nor dropped
        if self._shipper:
            self._shipper.hurry()
        if self._disk.wait_until_fits(size, 0.0):
            return
        warnings.warn(
            f"The log {self._directory} has used up its {self._disk.budget_bytes} bytes of disk: senders "
            "wait until a checkpoint is committed or segments are shipped. Raise log_budget_bytes, or make "
            "checkpoint_every smaller.",
            stacklevel=2,
        )
        if not self._disk.wait_until_fits(size, self._patience_s):
            raise LogTimeoutError(
                f"the log {self._directory} has used up its {self._disk.budget_bytes} bytes of disk, and "
                f"nothing went within {self._patience_s:g} s: raise log_budget_bytes, or make "
                "checkpoint_every smaller",
                path=self._directory,
            )

    def _with_room(self, record: Record) -> SegmentWriter:
        try:
            if self._open is None:
                self._open = SegmentWriter(self._store, self._directory, self._identity, self._sequence)
            self._open.reserve(record)
        except OSError as error:
            if lacks_room(error):
                self._disk.keep_spare(0)
            raise
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
        size = self._open.bytes_written
        self._committed_bytes += size
        self._disk.add(path, size)
        if self._shipper:
            self._shipper.offer(path)
        self._open = None
        self._sequence += 1
        self.segments += 1

    def abort(self) -> None:
        """Removes the open segment, if there is one."""
        if self._open is not None:
            self._open.abort()

    def drop(self, unwanted: Callable[[SegmentName], bool]) -> list[str]:
        """Deletes the segments in the store whose name says that they are unwanted. For any thread.

        Returns:
            The names of the deleted files.
        """
        dropped = []
        for file in self._shared.list(self._directory):
            name = parse_segment_name(file)
            if name and unwanted(name):
                self._shared.delete(f"{self._directory}/{file}")
                self._disk.remove(f"{self._directory}/{file}")
                dropped.append(file)
        return dropped
