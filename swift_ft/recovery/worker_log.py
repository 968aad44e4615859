"""One worker's log over the generations, and the readers of others."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from swift_ft.config import WorkerContext
from swift_ft.logging import LogReader, LogWriter, MessageKey, SegmentIdentity, Store, copy_into
from swift_ft.recovery.claim import log_directory

__all__ = ["WorkerLog", "sent_tensor"]


class WorkerLog:
    """Writes a worker's messages, with one writer per generation.

    Args:
        store: where.
        context: the worker's place.
        budget_bytes: messages that may wait to be written.

    Attributes:
        writer: the open writer; None between two generations.
        generation: of that writer, or of the last one.
    """

    def __init__(self, store: Store, context: WorkerContext, *, budget_bytes: int) -> None:
        self._store = store
        self._context = context
        self._budget_bytes = budget_bytes
        self._closed_bytes = 0
        self.writer: LogWriter | None = None
        self.generation = 0

    @property
    def bytes_logged(self) -> int:
        """Payload of all messages so far."""
        return self._closed_bytes + (self.writer.metrics().bytes if self.writer is not None else 0)

    def open(self, generation: int, *, since: int) -> LogWriter:
        """The writer of a generation; logs of a history that was given up (before ``since``) go."""
        if self.writer is not None and self.generation == generation:
            return self.writer
        self.close()
        identity = SegmentIdentity(self._context.run_id, self._context.rank, generation)
        directory = log_directory(self._context.rank)
        self.writer = LogWriter(self._store, directory, identity, budget_bytes=self._budget_bytes)
        self.writer.drop_generations_before(since)
        self.generation = generation
        return self.writer

    def flush(self) -> None:
        """Everything logged so far is in the store when this returns."""
        if self.writer is not None:
            self.writer.flush(self._context.timeouts.flush_s)

    def close(self) -> None:
        """Flush, and let go of the writer."""
        if self.writer is not None:
            self.writer.close(self._context.timeouts.flush_s)
            self._closed_bytes += self.writer.metrics().bytes
        self.writer = None

    def drop_before(self, iteration: int) -> None:
        """A checkpoint is committed and everybody knows: what came before it can go (§5.1)."""
        if (writer := self.writer) is not None:
            writer.drop_before(iteration)

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


def sent_tensor(reader: LogReader, key: MessageKey) -> torch.Tensor:
    """The tensor that was sent under a key, read back from the sender's log."""
    record = reader.message(key)
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype.removeprefix("torch.")))
    copy_into(record, tensor)
    return tensor
