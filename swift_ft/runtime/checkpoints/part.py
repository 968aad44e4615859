"""A worker's global checkpoints as a part of it: loaded by a plan, saved when due, offered to others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from swift_ft.checkpoint.checkpointer import Checkpointer
from swift_ft.config.worker_context import WorkerContext
from swift_ft.coordination.archive import JournalArchiver
from swift_ft.coordination.background_writer import BackgroundWriter
from swift_ft.coordination.progress import ProgressBoard
from swift_ft.errors import DamagedCheckpointError, SwiftError
from swift_ft.observe.spans import recorder
from swift_ft.recovery import events as ev
from swift_ft.recovery.job_state import State
from swift_ft.recovery.layout.stage_layers import StageLayers
from swift_ft.recovery.plan import Task
from swift_ft.recovery.topology import checkpoint_owner
from swift_ft.runtime.checkpoints.checkpointing import Saver
from swift_ft.runtime.checkpoints.housekeeping import Housekeeping
from swift_ft.runtime.checkpoints.part_peers import PartPeers
from swift_ft.runtime.worker.failures import failure_event
from swift_ft.runtime.worker.part import Part, Round
from swift_ft.runtime.worker.status import WorkerStatus

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Elsewhere:
    """Other parts, as far as a checkpoint needs them.

    Attributes:
        copy: loads a copy that another machine has in its memory.
        layout: has the layers that a state has in which a plan was made; None if no layer can move.
        end_segment: ends the segment of the log: what comes after the checkpoint is in another one.
        kept: within the block that it makes for an iteration, who loads the part of a replica keeps what its
            script has for itself, as it was then.
        note_variables: notes what a replacement has to have of this worker's own, at this iteration.
        exact: whether a replay rebuilds the state to the bit.
        saving: measures how long training waits in it.
    """

    copy: Callable[[Task], None]
    layout: Callable[[State], StageLayers | None]
    end_segment: Callable[[], None]
    kept: Callable[[int], AbstractContextManager[None]]
    note_variables: Callable[[int], None]
    exact: Callable[[], bool]
    saving: Callable[..., AbstractContextManager[None]]


class CheckpointsPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part` and :class:`swift_ft.runtime.worker.ports.Checkpoints`.

    Args:
        context: the worker's place.
        status: knows which iteration the state is at.
        checkpointer: writes and reads its part of the global checkpoint.
        saver: decides when that is saved.
        peers: offers what its machine's disk has of checkpoints; None without such copies.
        housekeeping: deletes what is old.
        archiver: archives the journal; None on workers that have not that duty.
        writer: notes what a replacement needs, while training goes on.
        progress: where the worker publishes what it does.
        elsewhere: what belongs to other parts.
    """

    name = "checkpoints"

    def __init__(
        self,
        context: WorkerContext,
        status: WorkerStatus,
        checkpointer: Checkpointer,
        saver: Saver,
        peers: PartPeers | None,
        housekeeping: Housekeeping,
        archiver: JournalArchiver | None,
        writer: BackgroundWriter,
        progress: ProgressBoard,
        elsewhere: Elsewhere,
    ) -> None:
        self._context = context
        self._status = status
        self._checkpointer = checkpointer
        self._saver = saver
        self._peers = peers
        self._housekeeping = housekeeping
        self._archiver = archiver
        self._writer = writer
        self._progress = progress
        self._elsewhere = elsewhere

    def load(self, state: State, task: Task) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        assert task.load is not None
        self._progress.publish(self._status.iteration, "loading")
        self._housekeeping.withdraw(state, self._context.config.checkpoint_timeout_s)
        layout = self._elsewhere.layout(state)
        if task.holder is None:
            workers = self._context.world_size if layout is None else None  # layers are found by number
            of_replica = checkpoint_owner(self._context.rank, state.round.statuses) != self._context.rank
            with self._elsewhere.kept(task.load) if of_replica else nullcontext():
                self._checkpointer.load(task.load, self._context.rank, layout, workers)
        else:
            self._elsewhere.copy(task)

    def due(self, iteration: int) -> bool:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        return self._saver.due(iteration)

    def regular(self, iteration: int) -> bool:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        return self._saver.regular(iteration)

    def save(self, iteration: int, *, replaying: bool = False) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        self._elsewhere.end_segment()
        if not replaying:  # before the part is reported: who finds the checkpoint finds the note
            self._elsewhere.note_variables(iteration)
        with self._elsewhere.saving(replaying=replaying):
            self._saver.save(iteration, replaying=replaying, exact=self._elsewhere.exact())

    def request(self, iteration: int, generation: int, reason: str) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        self._saver.request(iteration, generation, reason)

    def leave(self, iteration: int) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        self._saver.leave(iteration)
        self._housekeeping.drain(self._context.config.checkpoint_timeout_s, others_train=True)

    def failure(self, error: SwiftError, generation: int) -> ev.Event:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        if isinstance(error, DamagedCheckpointError):
            iteration = error.fields["iteration"]
            _logger.error("%s", error, extra={"event": "checkpoint_damaged", "iteration": iteration})
        return failure_event(error, self._context.rank, generation)

    def flush_notes(self) -> None:
        """See :class:`swift_ft.runtime.worker.ports.Checkpoints`."""
        with recorder.span("flush notes"):
            self._writer.flush(self._context.config.report_timeout_s)

    def settle(self, state: State) -> None:
        if self._peers is not None:
            with recorder.span("offer parts"):
                self._peers.offer(state.round.asked_in)

    def ready(self, ready: ev.WorkerReady) -> ev.WorkerReady:
        loaded = self._checkpointer.files.take_loaded()
        return replace(
            ready, loaded_own=loaded.own_disk, loaded_peers=loaded.peers, loaded_store=loaded.store
        )

    def live(self, round: Round) -> None:
        if self._peers is not None:
            self._peers.withdraw()

    def finish(self) -> None:
        self._saver.wait_for_part()

    def close(self) -> None:
        self._saver.finish(self._status.iteration)
        if self._archiver is not None:
            self._archiver.close()
        self._housekeeping.drain(self._context.config.checkpoint_timeout_s)
