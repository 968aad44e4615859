"""One worker's log over the generations, and the readers of others."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

from swift_ft.checkpoint.store_claim import log_directory
from swift_ft.config import store_keys
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.agent_channel import tell_agent
from swift_ft.logging import (
    CodecPolicy,
    FetchStats,
    LogOptions,
    LogReader,
    LogStats,
    LogTimeoutError,
    LogWriter,
    LogWriterMetrics,
    MessageLog,
    PeerLog,
    PeerSources,
    SegmentIdentity,
    SegmentSource,
    SegmentUploader,
)
from swift_ft.logging.writing.uploader import spool_place
from swift_ft.network.peer_server import LOGS, files
from swift_ft.runtime.metrics import LogMetrics
from swift_ft.runtime.peer_files import PeerFiles
from swift_ft.storage.store import Store

_logger = logging.getLogger(__name__)


class WorkerLog:
    """Writes a worker's messages, with one writer per generation, and serves them while others replay.

    Args:
        store: where segments go.
        context: the worker's place.
        options: how messages are logged. The budget is this worker's share.
        peers: where other workers find this log, and this worker finds theirs. None if the store is local:
            then all read from the store.
        is_cancelled: called with ``asked_in``: whether the replay that was then ordered is over.
        in_doubt: whether an abort may have changed what this worker has received in the running step.

    Attributes:
        messages: logs each message.
        stats: what that costs.
        fetch_stats: what was read of others' logs, and where it came from.
        generation: of the open writer, or of the last one.
        asked_in: the generation that began to ask for the reports of which this worker's is one. Under its
            number the logs of others are found.
        why_gap: why the log has, or had, a gap that no checkpoint covers yet; empty if it has none.
    """

    def __init__(
        self,
        store: Store,
        context: WorkerContext,
        options: LogOptions,
        peers: PeerFiles | None,
        *,
        is_cancelled: Callable[[int], bool],
        stays: bool = False,
        in_doubt: Callable[[], bool] = lambda: False,
    ) -> None:
        # Owner of all fields: the training thread. The housekeeping thread drops segments of the open writer,
        # and threads that serve metrics read.
        self._store = store
        self._context = context
        self._options = options
        self._closed = LogWriterMetrics()
        self._tier: SegmentUploader | None = None  # from the first generation to the end of the process
        self._peers = peers
        self._is_cancelled = is_cancelled
        self._stays = stays
        self._in_doubt = in_doubt
        self._since = -1  # older generations' segments are deleted
        self._lost = False  # what was logged last could not be written: the gap ends with a new generation
        self._whole_from = 0  # the first iteration after the last gap; also set by the writer's thread
        self._offered = False
        self.why_gap = ""
        self.stats = LogStats()
        self.fetch_stats = FetchStats()
        self._codec_policy = CodecPolicy(options.compress)
        self.messages = self._new_messages()
        self.generation = self.asked_in = 0
        place = store.local_path(log_directory(context.rank))
        if place is not None:
            tell_agent(log=str(place))  # a job that is stopped gives this worker no time to tidy up
        if options.two_tiers(store):
            tell_agent(spools=str(spool_place(options.local)))  # a killed worker's may be of many GB

    def _new_messages(self) -> MessageLog:
        return MessageLog(self._options, self.stats, in_doubt=self._in_doubt)

    @property
    def writer(self) -> LogWriter | None:
        """The open writer; None between two generations."""
        return self.messages.writer

    @property
    def bytes_logged(self) -> int:
        """Payload of all messages so far."""
        return self.stats.total_bytes

    def heartbeat(self) -> dict[str, float]:
        """The log's payload in bytes, and its share (0 to 1) of the disk budget, for the agent's metrics."""
        facts: dict[str, float] = {"log_bytes": self.bytes_logged}
        writer, budget_bytes = self.writer, self._options.budget.disk_bytes
        if writer is not None and budget_bytes:
            facts["log_budget_share"] = writer.metrics().disk_bytes / budget_bytes
        return facts

    def metrics(self) -> LogMetrics:
        """Of all generations so far."""
        writer, budget = self.writer, self._options.budget
        return LogMetrics(
            self.stats.last,
            self.stats.total,
            self._closed.plus(writer.metrics()) if writer is not None else self._closed,
            budget.memory_bytes,
            budget.disk_bytes,
            self._codec_policy.store_bytes_per_s,
            self._codec_policy.packing,
            self.fetch_stats.from_peers,
            self.fetch_stats.from_store,
            not self.why_gap,
        )

    def open(self, generation: int, *, since: int, begin: int) -> None:
        """Begin a generation.

        Args:
            generation: its number.
            since: logs of an abandoned history, before this generation, are deleted.
            begin: the first iteration that will be logged.
        """
        if self.writer is not None and self.generation == generation:
            return
        self._close()
        if self._lost or begin < self._whole_from:
            self._lost, self._whole_from = False, begin
        directory = log_directory(self._context.rank)
        if self._tier is None and self._options.two_tiers(self._store):
            keep = self._peers is not None
            self._tier = SegmentUploader(self._store, directory, self._options, self._codec_policy, keep=keep)
        writer = LogWriter(
            self._store,
            directory,
            SegmentIdentity(self._context.run_id, self._context.rank, generation),
            self._options,
            stats=self.stats,
            codec_policy=self._codec_policy,
            on_suspended=self._note_gap,
            on_resumed=self._note_end_of_gap,
            tier=self._tier,
            lazy=True,
        )
        if since != self._since:
            self._drop_generations(writer, since)
        self.messages.writer, self.generation = writer, generation

    def _drop_generations(self, writer: LogWriter, since: int) -> None:
        try:
            writer.drop_generations_before(since)
            self._since = since
        except OSError as error:  # they are never read, and deleted next time
            _logger.warning(
                "Old segments of worker %d could not be deleted: %s",
                self._context.rank,
                self._store.redacted(error),
                extra={"event": "segments_not_deleted"},
            )

    def left_out(self, completed: int) -> None:
        """The last of so many completed iterations is not in the log: a checkpoint is to cover it."""
        self._whole_from = completed
        self.why_gap = f"iteration {completed - 1} was not logged"

    def gap_before(self, iteration: int) -> int:
        """The iteration before which the log has a gap, if it ends at this iteration; 0 if it has none."""
        suspended = self.writer is not None and self.writer.gap.reason
        return iteration + 1 if self._lost or suspended else self._whole_from

    def why_checkpoint(self, committed: int | None) -> str:
        """Why an early checkpoint is needed: it would cover a gap that is over. Empty if it is not."""
        if not self.why_gap or self._lost or (self.writer is not None and self.writer.gap.reason):
            return ""
        if self._whole_from > (committed or 0):
            return "the log has a gap"
        self.why_gap = ""
        _logger.warning(
            "A checkpoint covers the gap in the log of worker %d: it is protected again.",
            self._context.rank,
            extra={"event": "log_whole_again", "rank": self._context.rank},
        )
        return ""

    def nearly_full(self) -> bool:
        """Whether an early checkpoint should make older segments deletable. Raises as the writer's does."""
        return self.writer is not None and self.writer.nearly_full()

    def roll(self) -> None:
        """End the segment here: a checkpoint is about to be saved."""
        if self.writer is not None:
            self.writer.roll()

    def flush(self) -> None:
        """Bring all that was logged so far into segments, though perhaps not into the store."""
        if self.writer is not None:
            try:
                self.messages.drain(self._context.config.flush_timeout_s)
                self.writer.flush(self._context.config.flush_timeout_s, uploaded=False)
            except LogTimeoutError as error:
                self._lose(error)

    def seal_and_offer(self, asked_in: int, *, uploaded: bool) -> None:
        """Close the writer: when this returns, others can read all that was logged.

        If this worker can serve its log itself, the segments reach the store later. A log that cannot be
        written in time has a gap, which :meth:`gap_before` tells.

        Args:
            asked_in: the generation that began to ask for reports. Those that report as well may read it.
            uploaded: the store must have it in any case.
        """
        until = time.monotonic() + self._context.config.within_report_s
        self._close(until)
        self.asked_in = asked_in
        if (tier := self._tier) is None or not tier.names():  # replicas alone log nothing
            return
        tier.expedite()
        served = self._serve(tier)
        # Else others read it from here, and need not wait for the upload (decision 51).
        if uploaded or not served:
            try:
                tier.flush(self._flush_s(until))
            except LogTimeoutError as error:
                if not served:
                    self._lose(error)
                else:
                    _logger.warning("%s", error, extra={"event": "log_not_uploaded"})

    def _serve(self, tier: SegmentUploader) -> bool:
        """Serve the log to those that report as well. False if that cannot be done."""
        if self._peers is None:
            return False
        rank = self._context.rank
        try:
            self._peers.serve(LOGS, files(tier.find))
        except OSError as error:
            _logger.warning(
                "Worker %d cannot serve its log at %s (%s): a replacement reads it from the store.",
                rank,
                self._context.address,
                error,
                extra={"event": "log_not_served", "rank": rank},
            )
            return False
        self._offered = True
        self._peers.offer(LOGS, store_keys.log_offer(self.asked_in, rank), names=tier.names())
        return True

    def withdraw(self) -> None:
        """Serve the log no longer: nobody repeats or replays an iteration from it any more."""
        if self._peers is not None and self._offered:
            self._offered = False
            self._peers.withdraw(LOGS)

    def close(self) -> None:
        """Training is over, and no worker reads the log any more.

        What is not in the store, and not on its way there, is deleted, unless the log stays: then it is
        waited for.
        """
        self._close()
        self.withdraw()
        if self._tier is not None:
            until = time.monotonic() + self._context.config.flush_timeout_s
            if self._stays:
                self._upload_rest(self._tier, until)
            self._tier.close(self._flush_s(until))
            self._tier = None

    def _upload_rest(self, tier: SegmentUploader, until: float) -> None:
        try:
            tier.flush(self._flush_s(until))
        except LogTimeoutError as error:
            _logger.warning(
                "The end of the log of worker %d is lost: %s",
                self._context.rank,
                error,
                extra={"event": "log_not_kept", "rank": self._context.rank},
            )

    def _flush_s(self, until: float) -> float:
        """The time that a flush may take which has to end at a monotonic time, with all others before it."""
        return max(0.0, min(self._context.config.flush_timeout_s, until - time.monotonic()))

    def _close(self, until: float = math.inf) -> None:
        if (writer := self.writer) is not None:
            try:
                self.messages.drain(self._flush_s(until))
                writer.close(self._flush_s(until), uploaded=False)
            except LogTimeoutError as error:
                self._lose(error)
            self._lost = self._lost or bool(writer.gap.reason)
            self._closed = self._closed.plus(writer.metrics())
        self.messages.writer = None

    def drop_before(self, iteration: int, generation: int) -> None:
        """A checkpoint is committed and all workers know it: delete what came before it (§5.1).

        Segments of generations after ``generation``, in which it was committed, stay: all workers may have
        returned to an older checkpoint since.
        """
        if (writer := self.writer) is not None:
            writer.drop_before(iteration, generation)

    def _lose(self, error: LogTimeoutError) -> None:
        """Give up the log since the last checkpoint: its end could not be written in time."""
        self._lost = True
        self._note_gap(str(error))

    def _note_gap(self, reason: str) -> None:
        """Also called by the writer's thread."""
        self.why_gap = reason
        _logger.error(
            "Worker %d trains on without a log, which cannot be written (%s). If a machine is lost before it "
            "can be written and a checkpoint is committed, this worker goes back to the last checkpoint.",
            self._context.rank,
            reason,
            extra={"event": "log_suspended", "rank": self._context.rank},
        )

    def _note_end_of_gap(self, iteration: int) -> None:
        """Called by the writer's thread."""
        self._whole_from = iteration
        _logger.warning(
            "The log of worker %d is written again, from iteration %d on. A checkpoint will cover the gap.",
            self._context.rank,
            iteration,
            extra={"event": "log_resumed", "rank": self._context.rank},
        )

    def read(self, ranks: Iterable[int], *, since: int, iteration: int) -> LogReader:
        """Read the committed logs of others, or this worker's own, from an iteration on.

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
            peers=PeerSources(
                offers,
                min(self._context.config.flush_timeout_s, self._context.config.within_replay_s),
                self._replay_cancelled,
            ),
            fetch_stats=self.fetch_stats if ranks != [self._context.rank] else None,
        )
        reader.refresh()
        return reader

    def _replay_cancelled(self) -> bool:
        return self._is_cancelled(self.asked_in)

    def _offer(self, rank: int) -> SegmentSource | None:
        """The place that has the log of a worker besides the store; None if none has."""
        if self._peers is None:
            return None
        if rank == self._context.rank:
            return self._tier
        if (offer := self._peers.find(store_keys.log_offer(self.asked_in, rank))) is None:
            return None
        return PeerLog(offer.address, self._context.secret, offer.facts["names"])
