"""One worker's log over the generations, and the readers of others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable

import torch

from swift_ft.config import WorkerContext
from swift_ft.logging import (
    CodecChoice,
    Fetched,
    Ledger,
    LogOptions,
    LogReader,
    LogWriter,
    LogWriterMetrics,
    MessageKey,
    MessageLog,
    Offer,
    Peers,
    SegmentIdentity,
    Shipper,
    Store,
    copy_into,
)
from swift_ft.metrics import LogMetrics
from swift_ft.recovery.claim import log_directory
from swift_ft.recovery.log_peers import LogPeers

__all__ = ["WorkerLog", "sent_tensor"]


class WorkerLog:
    """Writes a worker's messages, with one writer per generation, and serves them while others replay.

    Args:
        store: where.
        context: the worker's place.
        options: how; its budget is this worker's share.

    Attributes:
        messages: what is logged of messages.
        ledger: what that cost.
        fetched: what was read of others' logs, and where it came from.
        generation: of the open writer, or of the last one.
        handed_over: the generation in which this log was last handed over, and others' can be asked for.
    """

    def __init__(self, store: Store, context: WorkerContext, options: LogOptions) -> None:
        self._store = store
        self._context = context
        self._options = options
        self._closed = LogWriterMetrics()
        self._tier: Shipper | None = None  # from the first generation to the end of the process
        self._peers: LogPeers | None = None
        self._called_off: Callable[[], bool] = lambda: False
        self._since = -1  # older generations' segments are deleted
        self.ledger = Ledger()
        self.fetched = Fetched()
        self._choice = CodecChoice(options.compress)
        self.messages = MessageLog(options, self.ledger)
        self.generation = self.handed_over = 0

    def share(self, peers: LogPeers, called_off: Callable[[], bool]) -> None:
        """Serve this log to others who replay, and ask them for theirs, where the store is behind a network.

        Args:
            peers: who tells where.
            called_off: whether the replay that runs is over, for whatever reason.
        """
        if self._store.remote:
            self._peers, self._called_off = peers, called_off

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
            self.fetched.from_peers,
            self.fetched.from_store,
        )

    def open(self, generation: int, *, since: int) -> None:
        """Begin a generation; logs of a history that was given up (before ``since``) go."""
        if self.writer is not None and self.generation == generation:
            return
        self._close()
        directory = log_directory(self._context.rank)
        if self._peers is not None:
            self._peers.withdraw()
        if self._tier is None and self._options.two_tiers(self._store):
            keep = self._peers is not None
            self._tier = Shipper(self._store, directory, self._options, self._choice, keep=keep)
        writer = LogWriter(
            self._store,
            directory,
            SegmentIdentity(self._context.run_id, self._context.rank, generation),
            self._options,
            ledger=self.ledger,
            choice=self._choice,
            on_broken=self._be_replaced,
            tier=self._tier,
            lazy=True,
        )
        if since != self._since:
            writer.drop_generations_before(since)
            self._since = since
        self.messages.writer, self.generation = writer, generation

    def nearly_full(self) -> bool:
        """Whether an early checkpoint should let older segments go. Raises as the writer's does."""
        return self.writer is not None and self.writer.nearly_full()

    def cut(self) -> None:
        """End the segment here: a checkpoint is about to be saved."""
        if self.writer is not None:
            self.writer.cut()

    def flush(self) -> None:
        """Everything logged so far is in segments when this returns, if not in the store yet."""
        if self.writer is not None:
            self.messages.drain(self._context.timeouts.flush_s)
            self.writer.flush(self._context.timeouts.flush_s, shipped=False)

    def hand_over(self, generation: int, *, shipped: bool) -> None:
        """Let go of the writer: others can have everything that was logged when this returns.

        Where this worker can serve it itself, the store gets it afterwards.

        Args:
            generation: in which they may ask for it.
            shipped: the store must have it all the same.
        """
        self._close()
        self.handed_over = generation
        if (tier := self._tier) is None or not tier.names():  # replicas alone log nothing
            return
        tier.hurry()
        served = self._peers is not None and self._peers.offer(generation, tier)
        if shipped or not served:
            tier.flush(self._context.timeouts.flush_s)

    def close(self) -> None:
        """Training is over: nobody reads the log any more. The local tier goes, with what is not shipped."""
        self._close()
        if self._peers is not None:
            self._peers.withdraw()
        if self._tier is not None:
            self._tier.close()
            self._tier = None

    def _close(self) -> None:
        if (writer := self.writer) is not None:
            self.messages.drain(self._context.timeouts.flush_s)
            writer.close(self._context.timeouts.flush_s, shipped=False)
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
        """The committed logs of others, or this worker's own, from an iteration on.

        Raises:
            RecoveryError: if a segment that matters is torn or corrupt.
        """
        ranks = list(ranks)
        found = ((rank, self._offer(rank)) for rank in ranks)
        offers = {log_directory(rank): offer for rank, offer in found if offer is not None}
        reader = LogReader(
            self._store,
            [log_directory(rank) for rank in ranks],
            run_id=self._context.run_id,
            since_generation=since,
            from_iteration=iteration,
            peers=Peers(offers, self._context.timeouts.flush_s, self._called_off),
            fetched=self.fetched if ranks != [self._context.rank] else None,
        )
        reader.refresh()
        return reader

    def _offer(self, rank: int) -> Offer | None:
        if self._peers is None:
            return None
        return self._tier if rank == self._context.rank else self._peers.of(self.handed_over, rank)


def sent_tensor(reader: LogReader, key: MessageKey, device: torch.device) -> torch.Tensor:
    """The tensor that was sent under a key, read back from the sender's log."""
    record = reader.message(key)
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype.removeprefix("torch.")))
    copy_into(record, tensor)
    return tensor.to(device)
