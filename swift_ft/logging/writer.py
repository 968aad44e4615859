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
from dataclasses import dataclass, replace

import torch

from swift_ft.errors import SwiftError, UnsupportedError, UsageError
from swift_ft.logging.choice import CodecChoice
from swift_ft.logging.codec import Codec, pack
from swift_ft.logging.disk import DiskUse
from swift_ft.logging.ledger import Account, Ledger
from swift_ft.logging.options import LogOptions
from swift_ft.logging.queued import Cut, Item, QueuedReceipt, QueuedTensor
from swift_ft.logging.record import Kind, MessageKey, Record, changed_in_place, version_of
from swift_ft.logging.retry import is_transient
from swift_ft.logging.rotation import SegmentRotation
from swift_ft.logging.segment import SegmentIdentity, SegmentName
from swift_ft.logging.shipping import LogTimeoutError, Shipper
from swift_ft.logging.store import Store

__all__ = ["LogTimeoutError", "LogWriter", "LogWriterMetrics"]


@dataclass(frozen=True)
class LogWriterMetrics:
    """What a writer did so far.

    Attributes:
        bytes: written to segments, framing included.
        records: messages and receipts written.
        segments: committed.
        disk_bytes: of segments on the tier that is written to, those of earlier writers included.
        waiting_segments: complete, and not in the store yet.
    """

    bytes: int = 0
    records: int = 0
    segments: int = 0
    disk_bytes: int = 0
    waiting_segments: int = 0

    def plus(self, later: LogWriterMetrics) -> LogWriterMetrics:
        """Both together; what is there now is there for the later one."""
        return replace(
            later,
            bytes=self.bytes + later.bytes,
            records=self.records + later.records,
            segments=self.segments + later.segments,
        )


class LogWriter:
    """Logs messages and receipts of one worker.

    An error of the background thread is raised by the next call of any method but :meth:`metrics`, and by all
    after it: a log with a hole is of no use.

    Args:
        store: where.
        directory: the log's directory in the store; one writer at a time.
        identity: goes into every segment.
        options: budgets, tiers, packing.
        ledger: where held-back senders and the queue are accounted for.
        choice: of the codec; outlives the writer where it is given.
        on_broken: told, by the thread, of an error that nobody foresaw: what was in memory is lost.
        tier: the local tier that segments are written to first, where it outlives the writer. By default
            the writer has one of its own, where ``options`` or the store ask for it.
        lazy: let the thread rest until :meth:`wake`, or until half of the memory is used. Training that wakes
            it when it is about to wait itself does not compete with it for the interpreter.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        identity: SegmentIdentity,
        options: LogOptions | None = None,
        *,
        ledger: Ledger | None = None,
        choice: CodecChoice | None = None,
        on_broken: Callable[[BaseException], None] | None = None,
        tier: Shipper | None = None,
        lazy: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or LogOptions()
        self._store = store
        self._directory = directory
        self._budget_bytes = options.budget.memory_bytes
        self._stall_timeout_s = options.stall_timeout_s
        self._ledger = ledger or Ledger()
        self._choice = choice or CodecChoice(options.compress)
        self._on_broken = on_broken
        self._lazy = lazy
        self._clock = clock
        self._shipper, self._owns_tier = tier, tier is None
        if tier is None and options.two_tiers(store):
            self._shipper = Shipper(store, directory, options, self._choice)
        self._disk = self._shipper.disk if self._shipper else DiskUse(options.budget.disk_bytes)
        self._rotation = SegmentRotation(  # the thread's
            store, directory, identity, options, disk=self._disk, shipper=self._shipper
        )

        lock = threading.Lock()
        self._filled = threading.Condition(lock)
        self._drained = threading.Condition(lock)
        self._queue: deque[Item] = deque()
        self._queued_bytes = 0
        self._enqueued = self._completed = 0  # completed <= enqueued; between them: queue, thread's hands
        self._awake = not lazy  # the thread has been told to empty the queue
        self._closing = False
        self._error: BaseException | None = None
        self._bytes = self._records = self._segments = 0
        self._thread = threading.Thread(target=self._run, name="swift_ft log writer", daemon=True)
        self._thread.start()

    def append_message(
        self, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None = None
    ) -> None:
        """Queues a message that this worker sends. The tensor is kept by reference and must not change any
        more.

        Args:
            key: the message's.
            tensor: its content, in host memory.
            release: called, in any thread, when the tensor is not needed any more.

        Raises:
            UnsupportedError: the tensor is not in host memory.
            LogTimeoutError: there was no room for ``stall_timeout_s``.
            UsageError: the writer is closed, or an earlier tensor was changed after it had been handed over.
            SwiftError: an earlier record could not be written.
        """
        self._append(Kind.MESSAGE, key, tensor, release)

    def append_received(
        self, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None = None
    ) -> None:
        """Queues the receipt of a message, whose checksum the thread computes; as ``append_message``."""
        self._append(Kind.RECEIPT, key, tensor, release)

    def append_receipt(self, key: MessageKey, checksum: int, dtype: str, shape: tuple[int, ...]) -> None:
        """Queues the checksum of a message that this worker received; raises as ``append_message`` does."""
        self._put(QueuedReceipt(Record(Kind.RECEIPT, key, dtype, tuple(shape), checksum, None)))

    def wake(self) -> None:
        """Now is a good time to write what is queued. Does not wait."""
        with self._filled:
            self._wake()

    def cut(self) -> None:
        """Closes the segment after what is queued so far, without waiting for it."""
        self._put(Cut(), urgent=True)

    def flush(self, timeout_s: float, *, shipped: bool = True) -> None:
        """Waits until all that was queued before the call is committed.

        Args:
            timeout_s: how long at most.
            shipped: it must also be in the store, where it is written to the local disk first.

        Raises:
            LogTimeoutError: it was not within ``timeout_s`` seconds.
            SwiftError: it could not be written.
        """
        deadline = time.monotonic() + timeout_s
        ticket = self._put(Cut(), urgent=True)
        with self._disk.lifted(), self._drained:
            if not self._drained.wait_for(lambda: self._completed >= ticket or self._error, timeout_s):
                raise self._late(f"was not written within {timeout_s} s")
            self._raise_error()
        if self._shipper and shipped:
            self._shipper.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float, *, shipped: bool = True) -> None:
        """Flushes and ends the thread; a second call does nothing. Takes and raises what :meth:`flush` does.

        A local tier of its own is closed, too.
        """
        if self._closing:
            return
        try:
            self.flush(timeout_s, shipped=shipped)
        finally:
            with self._filled:
                self._closing = True
                self._filled.notify_all()
        self._thread.join()
        if self._shipper and self._owns_tier:
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

    def nearly_full(self) -> bool:
        """Whether the disk budget is nearly used up, so that a checkpoint should let older segments go.

        Raises:
            UsageError: the budget is too small for any checkpoint to come in time.
        """
        return self._disk.nearly_full(self._ledger.largest_bytes)

    def metrics(self) -> LogWriterMetrics:
        """A snapshot."""
        waiting = self._shipper.waiting if self._shipper else 0
        with self._drained:
            return LogWriterMetrics(self._bytes, self._records, self._segments, self._disk.bytes, waiting)

    # -- the callers' side

    def _append(
        self, kind: Kind, key: MessageKey, tensor: torch.Tensor, release: Callable[[], None] | None
    ) -> None:
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"{key}: a {tensor.device} tensor must be copied to the host before it is logged"
            )
        # Detached: the queue must not keep the autograd graph. Storage and version counter stay shared.
        tensor = tensor.detach()
        self._put(QueuedTensor(kind, key, tensor, version_of(tensor), release))

    def _put(self, item: Item, *, urgent: bool = False) -> int:
        size = item.size
        with self._filled:
            if self._queued_bytes and self._queued_bytes + size > self._budget_bytes:
                self._wake()
                self._wait_for_room(size)
            self._raise_error()
            if self._closing:
                raise UsageError(f"the log {self._directory} is closed", path=self._directory)
            self._queue.append(item)
            self._enqueued += 1
            self._queued_bytes += size
            queued = self._queued_bytes
            if urgent or not self._lazy or 2 * queued >= self._budget_bytes:
                self._wake()
            ticket = self._enqueued
        self._ledger.add(Account(queue_high_water_bytes=queued))
        return ticket

    def _wake(self) -> None:
        self._awake = True
        self._filled.notify()

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
            self._ledger.add(Account(held_back_s=self._clock() - started))

    def _raise_error(self) -> None:
        error = self._error
        if isinstance(error, SwiftError):
            raise type(error)(str(error), **error.fields) from error
        if error is not None:
            raise SwiftError(
                f"the log {self._store.url}/{self._directory} could not be written "
                f"({type(error).__name__}: {self._store.shown(error)}): training must not go on unlogged; "
                "make room or repair the store, and start again from the checkpoint",
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
            return waiting + self._rotation.drop(unwanted)
        except Exception as error:
            if not (self._store.remote and is_transient(error)):
                raise
            warnings.warn(
                f"Old segments of {self._directory} could not be deleted from {self._store.url} "
                f"({self._store.shown(error)}); the next checkpoint tries again.",
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
                lost = list(self._queue)
                self._queue.clear()
                self._queued_bytes = 0
                self._drained.notify_all()
            for item in lost:
                item.release()
            if self._on_broken is not None and not isinstance(error, SwiftError):
                self._on_broken(error)

    def _step(self) -> bool:
        # A function of its own, so that no local variable keeps the last tensor while the thread waits.
        with self._filled:
            while not (self._queue and self._awake):
                if self._closing:
                    return False
                self._filled.wait()
            item = self._queue.popleft()
            if self._lazy and not self._queue:
                self._awake = False
        if isinstance(item, Cut):
            self._rotation.cut()
        else:
            self._write(item)
            item.release()
        with self._drained:
            self._completed += 1
            self._bytes = self._rotation.bytes_written
            self._segments = self._rotation.segments
            self._queued_bytes -= item.size
            self._records += not isinstance(item, Cut)
            self._drained.notify_all()
        return True

    def _write(self, item: QueuedTensor | QueuedReceipt) -> None:
        self._rotation.write(self._packed(item.record()))
        # Looked at after the write: a change before it or during it is seen, too.
        if isinstance(item, QueuedTensor) and version_of(item.tensor) != item.version:
            raise changed_in_place(item.key)
        self._rotation.cut_if_full()

    def _packed(self, record: Record) -> Record:
        codec = self._choice.codec(record.dtype) if record.payload else Codec.NONE
        if codec is Codec.NONE or record.payload is None:
            return record
        started = time.perf_counter()
        packed = pack(record, codec)
        self._choice.packed(record.payload.nbytes, time.perf_counter() - started)
        return packed
