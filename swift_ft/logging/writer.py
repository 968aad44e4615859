"""The sender's log, written behind the back of training (§5.1 of the paper).

The training thread puts a reference to the tensor in a queue; a background thread computes the checksum,
writes, and cuts segments. The queue is bounded by bytes: when it is full the sender waits, and the wait is
counted. Nothing is dropped.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from swift_ft.errors import SwiftError, UnsupportedError, UsageError
from swift_ft.logging.codec import codec_for, pack
from swift_ft.logging.record import Kind, MessageKey, Record, checksum_of, dtype_name, tensor_bytes
from swift_ft.logging.retry import is_transient
from swift_ft.logging.rotation import SegmentRotation, drop_segments
from swift_ft.logging.segment import SegmentIdentity, SegmentName
from swift_ft.logging.shipping import LogTimeoutError, Ship, Shipper
from swift_ft.logging.store import Store

__all__ = ["LogTimeoutError", "LogWriter", "LogWriterMetrics"]


@dataclass(frozen=True)
class LogWriterMetrics:
    """What a writer did so far.

    Attributes:
        bytes: written to segments, framing included.
        records: messages and receipts written.
        segments: committed.
        held_back_s: seconds that senders waited for room in the queue.
        queue_high_water_bytes: most payload bytes that were queued at once.
    """

    bytes: int
    records: int
    segments: int
    held_back_s: float
    queue_high_water_bytes: int


@dataclass(frozen=True, slots=True)
class _Message:
    key: MessageKey
    tensor: torch.Tensor
    version: int
    size: int


class _Cut:
    """Closes the segment that is open when its turn comes."""


_Item = _Message | Record | _Cut


class LogWriter:
    """Logs messages and receipts of one worker.

    An error of the background thread is raised by the next call of any method but :meth:`metrics`, and by all
    after it: a log with a hole is of no use.

    Args:
        store: where.
        directory: the log's directory in the store; one writer at a time.
        identity: goes into every segment.
        budget_bytes: payload that may wait in the queue. A larger message is admitted alone.
        segment_bytes: a segment is closed when it is as large as this.
        stall_timeout_s: how long a sender waits for room, and the thread for a disk that is full or must not
            be written, before they give up.
        compress: pack payloads as :func:`swift_ft.logging.codec.codec_for` says. It pays where the store is
            slower than a core packs.
        ship: when segments go from the local disk to the store, where there are two tiers.
        local: folder for the local tier. A store behind a network has one in any case, by default among the
            system's temporary files; any other has one if this is given.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        identity: SegmentIdentity,
        *,
        budget_bytes: int = 256 << 20,
        segment_bytes: int = 64 << 20,
        stall_timeout_s: float = 600.0,
        compress: bool = False,
        ship: Ship = Ship.ALWAYS,
        local: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._directory = directory
        self._budget_bytes = budget_bytes
        self._stall_timeout_s = stall_timeout_s
        self._compress = compress
        self._clock = clock
        two_tiers = store.remote or local is not None
        self._shipper = Shipper(store, directory, ship, local) if two_tiers else None
        self._rotation = SegmentRotation(  # the thread's
            store, directory, identity, segment_bytes, shipper=self._shipper, patience_s=stall_timeout_s
        )

        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._drained = threading.Condition(lock)
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0
        self._enqueued = self._completed = 0  # completed <= enqueued; between them: queue, thread's hands
        self._closing = False
        self._error: BaseException | None = None
        self._bytes = self._records = self._segments = self._high_water_bytes = 0
        self._held_back_s = 0.0
        self._thread = threading.Thread(target=self._run, name="swift_ft log writer", daemon=True)
        self._thread.start()

    def append_message(self, key: MessageKey, tensor: torch.Tensor) -> None:
        """Queues a message that this worker sends. The tensor is kept by reference and must not change any
        more.

        Raises:
            UnsupportedError: the tensor is not in host memory.
            LogTimeoutError: there was no room for ``stall_timeout_s``.
            UsageError: the writer is closed, or an earlier tensor was changed after it had been handed over.
            SwiftError: an earlier record could not be written.
        """
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{key}: a {tensor.device} tensor must be copied to the host before it is logged"
            )
        # Detached: the queue must not keep the autograd graph. Storage and version counter stay shared.
        tensor = tensor.detach()
        self._put(_Message(key, tensor, _version_of(tensor), tensor.nbytes), tensor.nbytes)

    def append_receipt(self, key: MessageKey, checksum: int, dtype: str, shape: tuple[int, ...]) -> None:
        """Queues the checksum of a message that this worker received; raises as ``append_message`` does."""
        self._put(Record(Kind.RECEIPT, key, dtype, tuple(shape), checksum, None), 0)

    def cut(self) -> None:
        """Closes the segment after what is queued so far, without waiting for it."""
        self._put(_Cut(), 0)

    def flush(self, timeout_s: float) -> None:
        """Waits until all that was queued before the call is committed.

        Raises:
            LogTimeoutError: it was not within ``timeout_s`` seconds.
            SwiftError: it could not be written.
        """
        deadline = time.monotonic() + timeout_s
        ticket = self._put(_Cut(), 0)
        with self._drained:
            if not self._drained.wait_for(lambda: self._completed >= ticket or self._error, timeout_s):
                raise self._late(f"was not written within {timeout_s} s")
            self._raise_error()
        if self._shipper:
            self._shipper.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Flushes and ends the thread; a second call does nothing. Raises as :meth:`flush` does."""
        if self._closing:
            return
        try:
            self.flush(timeout_s)
        finally:
            with self._filled:
                self._closing = True
                self._filled.notify_all()
        self._thread.join()
        if self._shipper:
            self._shipper.close()

    def drop_before(self, iteration: int) -> list[str]:
        """Deletes committed segments, of any generation, that hold nothing of ``iteration`` or later.

        May be called from any thread.

        Returns:
            The names of the deleted segments.
        """
        return self._drop(lambda name: name.max_iteration < iteration)

    def drop_generations_before(self, generation: int) -> list[str]:
        """Deletes committed segments of generations before ``generation``; returns their names."""
        return self._drop(lambda name: name.generation < generation)

    def metrics(self) -> LogWriterMetrics:
        """A snapshot."""
        with self._drained:
            return LogWriterMetrics(
                self._bytes, self._records, self._segments, self._held_back_s, self._high_water_bytes
            )

    # -- the callers' side

    def _put(self, item: _Item, size: int) -> int:
        with self._filled:
            if self._queued_bytes and self._queued_bytes + size > self._budget_bytes:
                self._wait_for_room(size)
            self._raise_error()
            if self._closing:
                raise UsageError(f"the log {self._directory} is closed", path=self._directory)
            self._queue.append(item)
            self._enqueued += 1
            self._queued_bytes += size
            self._high_water_bytes = max(self._high_water_bytes, self._queued_bytes)
            self._filled.notify()
            return self._enqueued

    def _wait_for_room(self, size: int) -> None:
        def admitted() -> bool:
            # An error empties the queue, and so admits everybody to be told of it.
            fits = self._queued_bytes + size <= self._budget_bytes or not self._queued_bytes
            return fits or self._closing

        started = self._clock()
        try:
            if not self._drained.wait_for(admitted, self._stall_timeout_s):
                raise self._late(f"had no room for another message within {self._stall_timeout_s} s")
        finally:
            self._held_back_s += self._clock() - started

    def _raise_error(self) -> None:
        error = self._error
        if isinstance(error, SwiftError):
            raise type(error)(str(error), **error.fields) from error
        if error is not None:
            raise SwiftError(
                f"the log {self._store.url}/{self._directory} could not be written "
                f"({type(error).__name__}: {error}): training must not go on unlogged; make room or repair "
                "the store, and start again from the checkpoint",
                path=self._directory,
            ) from error

    def _late(self, what: str) -> LogTimeoutError:
        return LogTimeoutError(
            f"the log {self._store.url}/{self._directory} {what}, {self._queued_bytes} bytes are queued: "
            "the store is slower than the training, or hangs",
            path=self._directory,
            queued_bytes=self._queued_bytes,
        )

    def _drop(self, unwanted: Callable[[SegmentName], bool]) -> list[str]:
        with self._drained:
            self._raise_error()
        waiting = self._shipper.drop(unwanted) if self._shipper else []
        try:
            return waiting + drop_segments(self._store, self._directory, unwanted)
        except Exception as error:
            if not (self._store.remote and is_transient(error)):
                raise
            warnings.warn(
                f"Old segments of {self._directory} could not be deleted from {self._store.url} ({error}); "
                "the next checkpoint tries again.",
                stacklevel=3,
            )
            return waiting

    # -- the background thread

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # carried over to the callers, whatever it is
            with contextlib.suppress(Exception):  # the first error is the one that counts
                self._rotation.abort()
            with self._drained:
                self._error = error
                self._queue.clear()
                self._queued_bytes = 0
                self._drained.notify_all()

    def _step(self) -> bool:
        # A function of its own, so that no local variable keeps the last tensor while the thread waits.
        with self._filled:
            while not self._queue:
                if self._closing:
                    return False
                self._filled.wait()
            item = self._queue.popleft()
        if isinstance(item, _Cut):
            self._rotation.cut()
        else:
            self._write(item)
        with self._drained:
            self._completed += 1
            self._bytes = self._rotation.bytes_written
            self._segments = self._rotation.segments
            if isinstance(item, _Message):
                self._queued_bytes -= item.size
            self._records += not isinstance(item, _Cut)
            self._drained.notify_all()
        return True

    def _write(self, item: _Message | Record) -> None:
        record = item if isinstance(item, Record) else _recorded(item)
        self._rotation.write(pack(record, codec_for(record.dtype, compress=self._compress)))
        # Looked at after the write: a change before it or during it is seen, too.
        if isinstance(item, _Message) and _version_of(item.tensor) != item.version:
            raise UsageError(
                f"the tensor of {item.key} was changed in place after it had been sent, and before it was "
                "logged: send a clone of it, or change a clone",
                key=item.key,
            )
        self._rotation.cut_if_full()


def _recorded(item: _Message) -> Record:
    payload = tensor_bytes(item.tensor)
    tensor = item.tensor
    return Record(
        Kind.MESSAGE, item.key, dtype_name(tensor.dtype), tuple(tensor.shape), checksum_of(payload), payload
    )


def _version_of(tensor: torch.Tensor) -> int:
    # Inference tensors do not count their changes.
    return 0 if tensor.is_inference() else tensor._version
