"""One worker's log over the generations, and the readers of others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable

import torch

from swift_ft.config import WorkerContext
from swift_ft.logging import (
    CodecChoice,
    Ledger,
    LogOptions,
    LogReader,
    LogWriter,
    LogWriterMetrics,
    MessageKey,
    MessageLog,
    SegmentIdentity,
    Store,
    copy_into,
)
from swift_ft.metrics import LogMetrics
from swift_ft.recovery.claim import log_directory

__all__ = ["WorkerLog", "sent_tensor"]


class WorkerLog:
    """Writes a worker's messages, with one writer per generation.

    Args:
        store: where.
        context: the worker's place.
        options: how; its budget is this worker's share.

    Attributes:
        messages: what is logged of messages.
        ledger: what that cost.
        generation: of the open writer, or of the last one.
    """

    def __init__(self, store: Store, context: WorkerContext, options: LogOptions) -> None:
        self._store = store
        self._context = context
        self._options = options
        self._closed = LogWriterMetrics()
        self.ledger = Ledger()
        self._choice = CodecChoice(options.compress)
        self.messages = MessageLog(options, self.ledger)
        self.generation = 0

    @property
    def writer(self) -> LogWriter | None:
        """The open writer; None between two generations."""
        return self.messages.writer

    @property
    def bytes_logged(self) -> int:
        """Payload of all messages so far."""
        return self.ledger.total.bytes

    def metrics(self) -> LogMetrics:
        """Of all generations so far."""
        writer, budget = self.writer, self._options.budget
        return LogMetrics(
            self.ledger.last,
            self.ledger.total,
            self._closed.plus(writer.metrics()) if writer is not None else self._closed,
            budget.memory_bytes,
            budget.disk_bytes,
            self._choice.store_bytes_per_s,
            self._choice.packing,
        )

    def open(self, generation: int, *, since: int) -> None:
        """Begin a generation; logs of a history that was given up (before ``since``) go."""
        if self.writer is not None and self.generation == generation:
            return
        self.close()
        writer = LogWriter(
            self._store,
            log_directory(self._context.rank),
            SegmentIdentity(self._context.run_id, self._context.rank, generation),
            self._options,
            ledger=self.ledger,
            choice=self._choice,
            on_broken=self._be_replaced,
            lazy=True,
        )
        writer.drop_generations_before(since)
        self.messages.writer, self.generation = writer, generation

    def nearly_full(self) -> bool:
        """Whether an early checkpoint should let older segments go. Raises as the writer's does."""
        return self.writer is not None and self.writer.nearly_full()

    def cut(self) -> None:
        """End the segment here: a checkpoint is about to be saved."""
        if self.writer is not None:
            self.writer.cut()

    def flush(self) -> None:
        """Everything logged so far is in the store when this returns."""
        if self.writer is not None:
            self.messages.drain(self._context.timeouts.flush_s)
            self.writer.flush(self._context.timeouts.flush_s)

    def close(self) -> None:
        """Flush, and let go of the writer."""
        if (writer := self.writer) is not None:
            self.messages.drain(self._context.timeouts.flush_s)
            writer.close(self._context.timeouts.flush_s)
            self._closed = self._closed.plus(writer.metrics())
        self.messages.writer = None

    def drop_before(self, iteration: int) -> None:
        """A checkpoint is committed and everybody knows: what came before it can go (§5.1)."""
        if (writer := self.writer) is not None:
            writer.drop_before(iteration)

    def _be_replaced(self, error: BaseException) -> None:
        """What was not written is lost, but whoever replaces this worker sends, and logs, all of it again.

        A broken disk then stays behind with its machine.
        """
        print(
            f"swift_ft: worker {self._context.rank} ends here, to be replaced: its log could not be written "
            f"({type(error).__name__}: {self._store.shown(error)})",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGKILL)

    def read(self, ranks: Iterable[int], *, since: int, iteration: int) -> LogReader:
        """The committed logs of workers, from an iteration on.

        Raises:
            RecoveryError: if a segment that matters is torn or corrupt.
        """
        reader = LogReader(
            self._store,
            [log_directory(rank) for rank in ranks],
            run_id=self._context.run_id,
            since_generation=since,
            from_iteration=iteration,
        )
        reader.refresh()
        return reader


def sent_tensor(reader: LogReader, key: MessageKey, device: torch.device) -> torch.Tensor:
    """The tensor that was sent under a key, read back from the sender's log."""
    record = reader.message(key)
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype.removeprefix("torch.")))
    copy_into(record, tensor)
    return tensor.to(device)
