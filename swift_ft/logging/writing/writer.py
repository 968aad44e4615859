"""The sender's log, written in the background (§5.1 of the paper).

The training thread puts a reference to the tensor in a queue; a background thread computes the checksum,
writes, and rolls segments. The queue is bounded by bytes: when it is full the sender waits, and the wait is
counted. Nothing is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from swift_ft.errors import SwiftError, UnsupportedError, UsageError
from swift_ft.logging.format.codec import Codec, pack
from swift_ft.logging.format.record import MessageKey, Record, RecordKind, changed_in_place_error
from swift_ft.logging.format.segment import SegmentIdentity, SegmentName
from swift_ft.logging.options import LogOptions
from swift_ft.logging.stats import IterationStats, LogStats, LogWriterMetrics
from swift_ft.logging.writing.codec_policy import CodecPolicy
from swift_ft.logging.writing.disk_budget import DiskBudget
from swift_ft.logging.writing.queue_items import (
    QueuedReceipt,
    QueuedTensor,
    QueueItem,
    Roll,
    SuspendedError,
    Suspension,
)
from swift_ft.logging.writing.rotation import SegmentRotation
from swift_ft.logging.writing.uploader import LogTimeoutError, SegmentUploader
from swift_ft.observe.waits import waiting
from swift_ft.storage.retry import is_transient
from swift_ft.storage.store import Store
from swift_ft.torch_core.tensors import version_of

__all__ = ["LogTimeoutError", "LogWriter"]

_logger = logging.getLogger(__name__)

_TRY_AGAIN_S = 1.0
"""Between two attempts to write a log again that is suspended."""


class LogWriter:
    """Logs messages and receipts of one worker.

    A log that cannot be written is *suspended*, if ``on_suspended`` is given: messages are dropped until it
    can be written again, and from then on until the iteration ends. So it has one gap, and is whole from
    ``gap.whole_from`` on. Else, and after a mistake of the caller, every call raises the error of the
    background thread, except :meth:`metrics`.

    Args:
        store: the store of the log.
        directory: the log's directory in the store; one writer at a time.
        identity: goes into every segment.
        options: budgets, tiers, packing.
        stats: receives the waits of senders and the size of the queue.
        codec_policy: chooses codecs; may outlive the writer.
        on_suspended: called by the thread with the reason when the log is suspended.
        on_resumed: called by the thread, with the iteration from which the log is whole again.
        tier: the local tier that segments are written to first, if it outlives the writer. By default the
            writer makes its own, if ``options`` or the store require one.
        lazy: the thread sleeps until :meth:`wake`, or until half of the memory is used. Training wakes it
            when it is about to wait, so that the two do not compete for the interpreter.
        clock: seconds, monotonic.

    Attributes:
        gap: whether the log is suspended, and since when it is whole. Owner: the lock; read by any thread.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        identity: SegmentIdentity,
        options: LogOptions | None = None,
        *,
        stats: LogStats | None = None,
        codec_policy: CodecPolicy | None = None,
        on_suspended: Callable[[str], None] | None = None,
        on_resumed: Callable[[int], None] = lambda iteration: None,
        tier: SegmentUploader | None = None,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or LogOptions()
        self._store = store
        self._directory = directory
        self._budget_bytes = options.budget.memory_bytes
        self._stall_timeout_s = options.stall_timeout_s
        self._stats = stats or LogStats()
        self._codec_policy = codec_policy or CodecPolicy(options.compress)
        self._on_suspended, self._on_resumed = on_suspended, on_resumed
        self._lazy = lazy
        self._clock = clock
        self._uploader, self._owns_tier = tier, tier is None
        if tier is None and options.two_tiers(store):
            self._uploader = SegmentUploader(store, directory, options, self._codec_policy)
        self._disk = self._uploader.disk if self._uploader else DiskBudget(options.budget.disk_bytes)
        self._rotation = SegmentRotation(  # the thread's
            store, directory, identity, options, disk=self._disk, uploader=self._uploader
        )

        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._drained = threading.Condition(lock)
        self._queue: deque[QueueItem] = deque()
        self._queued_bytes = 0
        self._enqueued = self._completed = 0  # completed <= enqueued; the rest is in progress
        self._awake = not lazy  # the thread may empty the queue
        self._closing = False
        self.gap = Suspension()
        self._error: BaseException | None = None
        self._bytes = self._records = self._segments = 0
        self._thread = threading.Thread(target=self._run, name="swift-log-writer", daemon=True)
        self._thread.start()

    def append_message(
        self, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None = None
    ) -> None:
        """Queues a message that this worker sends. The tensor is kept by reference and must not change.

        Args:
            key: the message's.
            tensor: its content, in host memory.
            release: called, in any thread, when the tensor is no longer needed.

        Raises:
            UnsupportedError: the tensor is not in host memory.
            LogTimeoutError: there was no room for ``stall_timeout_s``.
            UsageError: the writer is closed, or an earlier tensor was changed after it was queued.
            SwiftError: an earlier record could not be written.
        """
        self._append(RecordKind.MESSAGE, key, tensor, release)

    def append_received(
        self, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None = None
    ) -> None:
        """Queues the receipt of a message, whose checksum the thread computes; as ``append_message``."""
        self._append(RecordKind.RECEIPT, key, tensor, release)

    def append_receipt(self, key: MessageKey, checksum: int, dtype: str, shape: tuple[int, ...]) -> None:
        """Queues the checksum of a message that this worker received; raises as ``append_message`` does."""
        self._put(QueuedReceipt(Record(RecordKind.RECEIPT, key, dtype, tuple(shape), checksum, None)))

    def wake(self, least_bytes: int = 0) -> None:
        """Lets the thread write the queue, if that has so many bytes. Does not wait."""
        if self._queue and self._queued_bytes >= least_bytes:
            with self._filled:
                self._wake()

    def is_in_gap(self, iteration: int) -> bool:
        """Whether a message of an iteration would be dropped now: then its sender need not copy it."""
        with self._filled:
            return self.gap.drops(iteration)

    def suspend(self, reason: str, iteration: int) -> bool:
        """Begin a gap: what is queued is lost, and the caller has lost messages that were to be queued.

        Args:
            reason: why.
            iteration: the newest of theirs.

        Returns:
            False for a log that may have no gap: nothing was done.
        """
        if self._on_suspended is None:
            return False
        with self._drained:
            self.gap.drops(iteration)
            lost = self._empty_queue(reason)
        for item in lost:
            item.release()
        return True

    def roll(self) -> None:
        """Closes the segment after all items that are queued so far. Does not wait."""
        self._put(Roll(), urgent=True)

    def flush(self, timeout_s: float, *, uploaded: bool = True) -> None:
        """Waits until all items that were queued before the call are committed.

        Args:
            timeout_s: how long at most.
            uploaded: wait until they are also in the store, if they are written to the local disk first.

        Raises:
            LogTimeoutError: that took more than ``timeout_s`` seconds.
            SwiftError: it could not be written.
        """
        deadline = time.monotonic() + timeout_s
        ticket = self._put(Roll(), urgent=True)
        what = f"its log to be written to {self._store.url}"
        with self._disk.suspended(), waiting(what, timeout_s), self._drained:
            if not self._drained.wait_for(lambda: self._completed >= ticket or self._error, timeout_s):
                raise self._late(f"was not written within {timeout_s} s")
            self._raise_error()
        if self._uploader and uploaded and not self.gap.reason:
            self._uploader.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float, *, uploaded: bool = True) -> None:
        """Flushes and ends the thread; a second call does nothing. Arguments and errors: see :meth:`flush`.

        Also closes the local tier if the writer made it.
        """
        if self._closing:
            return
        try:
            self.flush(timeout_s, uploaded=uploaded)
        finally:
            with self._filled:
                self._closing = True
                self._filled.notify_all()
        # It has nothing left to write, unless it hangs in the store.
        self._thread.join(_TRY_AGAIN_S if self.gap.reason else timeout_s)
        if self._uploader and self._owns_tier:
            self._uploader.close(timeout_s)

    def drop_before(self, iteration: int, generation: int | None = None) -> list[str]:
        """Deletes committed segments that hold nothing of ``iteration`` or later.

        May be called from any thread.

        Returns:
            The names of the deleted segments.
        """
        return self._drop(
            lambda name: (
                name.max_iteration < iteration and (generation is None or name.generation <= generation)
            )
        )

    def drop_generations_before(self, generation: int) -> list[str]:
        """Deletes committed segments of generations before ``generation``; returns their names."""
        return self._drop(lambda name: name.generation < generation)

    def nearly_full(self) -> bool:
        """Whether the disk budget is nearly used up, so a checkpoint should make older segments deletable.

        Raises:
            UsageError: the budget is too small for any checkpoint to come in time.
        """
        return self._disk.nearly_full(self._stats.largest_bytes)

    def metrics(self) -> LogWriterMetrics:
        """A snapshot."""
        waiting = self._uploader.waiting if self._uploader else 0
        with self._drained:
            return LogWriterMetrics(self._bytes, self._records, self._segments, self._disk.bytes, waiting)

    # -- the callers' side

    def _append(
        self, kind: RecordKind, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None
    ) -> None:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{key}: a {tensor.device} tensor must be copied to the host before it is logged"
            )
        # Detached: the queue must not keep the autograd graph. Storage and version counter stay shared.
        tensor = tensor.detach()
        self._put(QueuedTensor(kind, key, tensor, version_of(tensor), release))

    def _put(self, item: QueueItem, *, urgent: bool = False) -> int:
        size = item.size
        with self._filled:
            full = self._queued_bytes and self._queued_bytes + size > self._budget_bytes
            lost: list[QueueItem] = []
            if full and not self.gap.reason:
                self._wake()
                lost = self._wait_for_room(size)
            self._raise_error()
            if self._closing:
                raise UsageError(f"the log {self._directory} is closed", path=self._directory)
            if not (dropped := self.gap.drops(item.iteration)):
                self._queue.append(item)
                self._enqueued += 1
                self._queued_bytes += size
            queued = self._queued_bytes
            if not dropped and (urgent or not self._lazy or 2 * queued >= self._budget_bytes):
                self._wake()
            ticket = self._enqueued
        for gone in [*lost, item] if dropped else lost:
            gone.release()
        self._stats.queued(queued)
        return ticket

    def _wake(self) -> None:
        self._awake = True
        self._filled.notify()

    def _wait_for_room(self, size: int) -> list[QueueItem]:
        """Returns what is lost because there was none in time."""

        def admitted() -> bool:
            # An error empties the queue. Every waiting sender proceeds, and raises it or drops its message.
            fits = self._queued_bytes + size <= self._budget_bytes or not self._queued_bytes
            return fits or self._closing

        started = self._clock()
        try:
            with waiting(f"its log to be written to {self._store.url}", self._stall_timeout_s):
                in_time = self._drained.wait_for(admitted, self._stall_timeout_s)
            if not in_time:
                late = self._late(f"had no room for another message within {self._stall_timeout_s} s")
                if self._on_suspended is None:
                    raise late
                return self._empty_queue(str(late))
        finally:
            self._stats.add(IterationStats(held_back_s=self._clock() - started))
        return []

    def _raise_error(self) -> None:
        error = self._error
        if isinstance(error, SwiftError):
            raise type(error)(str(error), **error.fields) from error
        if error is not None:
            raise SwiftError(
                f"the log {self._store.url}/{self._directory} could not be written "
                f"({type(error).__name__}: {self._store.redacted(error)}): training must not continue "
                "without a log; make room or repair the store, and start again from the checkpoint",
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
        waiting = self._uploader.drop(unwanted) if self._uploader else []
        try:
            return waiting + self._rotation.drop(unwanted)
        except Exception as error:
            if not (self._store.remote and is_transient(error)):
                raise
            _logger.warning(
                "Old segments of %s could not be deleted from %s (%s): the next checkpoint tries again",
                self._directory,
                self._store.url,
                self._store.redacted(error),
                extra={"event": "segments_not_deleted"},
            )
            return waiting

    # -- the background thread

    def _run(self) -> None:
        while True:
            try:
                self._write_queue()
            except BaseException as error:  # passed on to the callers, or known to them as a gap
                with contextlib.suppress(Exception):  # the first error is the one that counts
                    self._rotation.abort()
                suspends = self._on_suspended is not None and (
                    isinstance(error, LogTimeoutError | SuspendedError) or not isinstance(error, SwiftError)
                )
                with self._drained:
                    self._error = None if suspends else error
                    reason = f"{type(error).__name__}: {self._store.redacted(error)}"
                    lost = self._empty_queue(reason if suspends else "")
                for item in lost:
                    item.release()
                if not suspends or not self._resume():
                    return
            else:
                return

    def _empty_queue(self, reason: str) -> list[QueueItem]:
        """Under the lock: the queue is lost, for good or, for a reason, in a gap of the log."""
        lost = list(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        self._completed = self._enqueued
        if reason and self.gap.begin(reason) and self._on_suspended is not None and not self._closing:
            self._on_suspended(reason)
        self._drained.notify_all()
        return lost

    def _resume(self) -> bool:
        """While the log is suspended: wait until it can be written. False if it is closed before."""
        with waiting(f"{self._store.url} to take its log again, while training goes on without it"):
            while True:
                with self._filled:
                    if self._filled.wait_for(lambda: self._closing, _TRY_AGAIN_S):
                        return False
                with contextlib.suppress(Exception):  # why it was suspended is known; it is tried again
                    self._rotation.try_to_begin_again(self._stats.largest_bytes)
                    break
        with self._drained:
            if not self._closing:
                self._on_resumed(self.gap.end())
        return True

    def _write_queue(self) -> None:
        """Writes until the writer is closed."""
        written: type[QueueItem] | None = None
        size = 0
        while (item := self._next(written, size)) is not None:
            try:
                if isinstance(item, Roll):
                    self._rotation.roll()
                else:
                    self._write(item)
            finally:
                item.release()
            written, size = type(item), item.size
            del item  # nothing keeps its tensor while the thread waits

    def _next(self, written: type[QueueItem] | None, size: int) -> QueueItem | None:
        """Counts the item that was written, and waits for the next one: under the lock, which is taken once.

        Args:
            written: the kind of the one before; None before the first.
            size: the memory that it held, in bytes.

        Returns:
            The next one; None if the writer is closed and has no other.
        """
        with self._filled:
            if written is not None:
                if self.gap.reason:  # a sender has waited for too long, and gave up
                    raise SuspendedError(self.gap.reason)
                self._completed += 1
                self._bytes = self._rotation.bytes_written
                self._segments = self._rotation.segments
                self._queued_bytes -= size
                self._records += written is not Roll
                self._drained.notify_all()
            while not (self._queue and self._awake):
                if self.gap.reason:
                    raise SuspendedError(self.gap.reason)
                if self._closing:
                    return None
                self._filled.wait()
            if self._lazy and len(self._queue) == 1:
                self._awake = False
            return self._queue.popleft()

    def _write(self, item: QueuedTensor | QueuedReceipt) -> None:
        self._rotation.write(self._packed(item.record()))
        # Checked after the write, so that a change before or during it is detected.
        if isinstance(item, QueuedTensor) and version_of(item.tensor) != item.version:
            raise changed_in_place_error(item.key)
        self._rotation.roll_if_full()

    def _packed(self, record: Record) -> Record:
        codec = self._codec_policy.codec(record.dtype) if record.payload else Codec.NONE
        if codec is Codec.NONE or record.payload is None:
            return record
        started = time.perf_counter()
        packed = pack(record, codec)
        self._codec_policy.record_packing(record.payload.nbytes, time.perf_counter() - started)
        return packed
