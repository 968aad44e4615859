"""The segments of one log directory, for its one writer: opens, commits and drops them."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable
from typing import TypeVar

from swift_ft.logging.format.record import Record
from swift_ft.logging.format.segment import (
    FRAMING_BYTES,
    SegmentIdentity,
    SegmentName,
    SegmentWriter,
    parse_segment_name,
)
from swift_ft.logging.options import LogOptions
from swift_ft.logging.writing.disk_budget import DiskBudget
from swift_ft.logging.writing.uploader import LogTimeoutError, SegmentUploader
from swift_ft.observe.waits import waiting
from swift_ft.storage.retry import is_outage, retry
from swift_ft.storage.store import Store

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class SegmentRotation:
    """Writes records into one segment after the other. Not for use by several threads.

    Temporary files that a dead writer left in the directory are deleted. The sequence continues after the
    existing segments of the generation.

    Args:
        store: the store of the log.
        directory: the log's directory in the store.
        identity: goes into every segment.
        options: size of a segment, and how long to wait for a disk that is full or not writable.
        disk: the disk budget; the uploader's, where there is one.
        uploader: uploads the segments, if they are written to the local disk first.

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
        disk: DiskBudget,
        uploader: SegmentUploader | None = None,
    ) -> None:
        self._shared = store
        self._store = (uploader.local if uploader else store).at_once()
        self._uploader = uploader
        self._disk = disk
        self._stall_timeout_s, self._patience_s = options.stall_timeout_s, options.outage_patience_s
        self._directory = directory
        self._identity = identity
        self._segment_bytes = options.segment_bytes
        self._open: SegmentWriter | None = None
        self._committed_bytes = 0
        self._warned = False  # of a full budget, once
        self._warned_at = -math.inf  # of an outage
        self.segments = 0
        self._room = f"room on the disk of its log, {store.url}"
        self._sequence: int | None = None  # of the next segment; None until the directory could be read
        with contextlib.suppress(OSError):  # it is tried again before the first record
            self._sequence = self._begin()

    @property
    def bytes_written(self) -> int:
        """Bytes of all segments, framing included, the open one so far."""
        return self._committed_bytes + (self._open.bytes_written if self._open else 0)

    def write(self, record: Record) -> None:
        """Appends a record, to a new segment where none is open.

        Room for the whole record is reserved before its first byte is written: the writer can wait for a full
        disk between two records, but not within one.
        """
        self._keep_to_budget((record.payload.nbytes if record.payload else 0) + FRAMING_BYTES)
        self._wait_out(lambda: self._with_room(record)).append(record)
        self._disk.grow(self._open.bytes_written if self._open else 0)

    def _begin(self) -> int:
        """Takes over the directory; returns the number of the first segment."""
        if self._uploader:
            files = self._uploader.names()
        else:
            self._store.sweep(self._directory, self._is_ours)
            files = self._store.list(self._directory)
            if self._disk.budget_bytes is not None:
                for path in (f"{self._directory}/{file}" for file in files if parse_segment_name(file)):
                    self._disk.add(path, self._store.size(path))
        names = map(parse_segment_name, files)
        taken = [name.sequence for name in names if name and name.generation == self._identity.generation]
        return max(taken, default=-1) + 1

    def _keep_to_budget(self, size: int) -> None:
        if self._disk.wait_until_fits(size, 0.0):
            return
        self.roll()  # an open segment can neither be uploaded nor dropped
        if self._uploader:
            self._uploader.expedite()
        if self._disk.wait_until_fits(size, 0.0):
            return
        if not self._warned:
            self._warned = True
            _logger.warning(
                "The log %s has used up its %d bytes of disk: senders wait until a checkpoint is committed "
                "or segments are uploaded. Raise log_budget_bytes, or make checkpoint_every smaller.",
                self._directory,
                self._disk.budget_bytes,
                extra={"event": "disk_budget_exhausted"},
            )
        limit_s = self._stall_timeout_s
        with waiting("a checkpoint or an upload, so that older segments of the log can go", limit_s):
            fits = self._disk.wait_until_fits(size, limit_s)
        if not fits:
            raise LogTimeoutError(
                f"the log {self._directory} has used up its {self._disk.budget_bytes} bytes of disk, and "
                f"nothing was deleted within {self._stall_timeout_s:g} s: raise log_budget_bytes, or make "
                "checkpoint_every smaller",
                path=self._directory,
            )

    def _with_room(self, record: Record) -> SegmentWriter:
        try:
            if self._sequence is None:
                self._sequence = self._begin()
            if self._open is None:
                self._open = SegmentWriter(self._store, self._directory, self._identity, self._sequence)
            self._open.reserve(record)
        except OSError as error:
            if is_outage(error):
                self._disk.evict_down_to(0)
            raise
        return self._open

    def roll_if_full(self) -> None:
        """Commits the open segment if it has reached its size."""
        if self._open is not None and self._open.bytes_written >= self._segment_bytes:
            self.roll()

    def roll(self) -> None:
        """Commits the open segment, if there is one."""
        if self._open is None or self._sequence is None:
            return
        path = self._wait_out(self._open.commit)
        size = self._open.bytes_written
        self._committed_bytes += size
        self._disk.add(path, size)
        if self._uploader:
            self._uploader.offer(path)
        self._open = None
        self._sequence += 1
        self.segments += 1

    def abort(self) -> None:
        """Removes the open segment, if there is one."""
        if (segment := self._open) is not None:
            self._open = None
            self._disk.grow(0)
            segment.abort()

    def try_to_begin_again(self, size: int) -> None:
        """After an :meth:`abort`: deletes all segments, which cannot be used any more, and tries to write.

        Args:
            size: bytes for which there must be room.

        Raises:
            Exception: what the store raised.
        """
        generation = self._identity.generation  # this worker may have been replaced meanwhile
        self.drop(lambda name: name.generation <= generation, at_once=True)
        if self._uploader:
            self._uploader.drop(lambda name: name.generation <= generation)
        self._sequence = self._begin()
        with self._store.open_write(f"{self._directory}/g{generation:05d}-trial") as trial:
            trial.reserve(size + FRAMING_BYTES)
            trial.write(bytes(FRAMING_BYTES))
            trial.flush()
            trial.abort()

    def _is_ours(self, name: str) -> bool:
        """Whether a temporary file is of this writer or of an earlier one."""
        generation = re.match(r"g(\d+)-", name)
        return generation is None or int(generation[1]) <= self._identity.generation

    def _wait_out(self, action: Callable[[], T]) -> T:
        return retry(action, self._patience_s, is_outage, what=self._room, on_wait=self._warn)

    def _warn(self, error: BaseException) -> None:
        if (now := time.monotonic()) - self._warned_at < self._patience_s:
            return
        self._warned_at = now
        _logger.warning(
            "The log %s/%s cannot be written (%s: %s). It is tried again for %g s.",
            self._store.url,
            self._directory,
            type(error).__name__,
            self._store.redacted(error),
            self._patience_s,
            extra={"event": "log_waits"},
        )

    def drop(self, unwanted: Callable[[SegmentName], bool], *, at_once: bool = False) -> list[str]:
        """Deletes the segments in the store whose names match ``unwanted``. For any thread.

        Args:
            unwanted: of a segment's name.
            at_once: do not wait for a store that is down.

        Returns:
            The names of the deleted files.
        """
        dropped = []
        store = self._shared.at_once() if at_once else self._shared
        for file in store.list(self._directory):
            name = parse_segment_name(file)
            if name and unwanted(name):
                store.delete(f"{self._directory}/{file}")
                self._disk.remove(f"{self._directory}/{file}")
                dropped.append(file)
        return dropped
