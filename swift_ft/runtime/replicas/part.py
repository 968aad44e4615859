"""A worker's replicas as a part of it: their updates are undone, and their state is made equal (paper §4)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.observe.spans import recorder
from swift_ft.recovery.events import StatusReported
from swift_ft.recovery.plan import Plan, Task
from swift_ft.recovery.recoveries import lost_statistics
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker.part import Interruption, Part, Round, StepInfo
from swift_ft.runtime.worker.status import WorkerStatus
from swift_ft.torch_adapters.versions.buffer_sync import BUFFER_SYNC

_logger = logging.getLogger(__name__)


class Sync(Protocol):
    """Makes replicas equal, once the group is formed."""

    def apply_transfers(self, plan: Plan) -> str | None:
        """Returns why that was interrupted; None if it was not."""


class ReplicasPart(Part):
    """See :class:`swift_ft.runtime.worker.part.Part`.

    Args:
        status: knows which iteration the state is at, and what is updated.
        replicas: hold the same model; without any, a worker may still be a replica by layer, or undo exactly.
        rollback: goes back where updates are undone.
        sync: makes replicas equal.
        holds: names the parts of the model that are on this worker.
        pipelined: the worker has stages of a pipeline.
        by_layer: its pipeline has replicas by layer (:class:`swift_ft.LayerStack`).
    """

    name = "replicas"

    def __init__(
        self,
        status: WorkerStatus,
        replicas: Replicas,
        rollback: Rollback,
        sync: Sync,
        holds: Callable[[], tuple[str, ...]],
        *,
        pipelined: bool,
        by_layer: bool,
    ) -> None:
        self._status = status
        self._replicas = replicas
        self._rollback = rollback
        self._sync = sync
        self._holds = holds
        self._pipelined = pipelined
        self._by_layer = by_layer
        self._rounded_before = 0  # the iteration before which an undo has rounded, and logs have two copies

    def begin(self, step: StepInfo) -> None:
        if not step.replayed:
            self._replicas.compare_variables(step.iteration)
        self._replicas.begin(step.iteration)

    def live(self, round: Round) -> None:
        if self._replicas.own_variables is not None:
            self._replicas.own_variables.live()

    def completed(self, step: StepInfo) -> None:
        self._replicas.completed()

    def interrupted(self, interruption: Interruption) -> None:
        self._replicas.drain()
        if interruption.in_step:
            self._status.dirty = self._replicas.updates.updated_again()

    def put_back(self, interruption: Interruption) -> None:
        if not interruption.in_step:
            return
        self._status.updated = self._replicas.updates.updated()  # less those that copies have put back
        self._status.dirty = self._status.dirty or self._replicas.updates.refused()
        if interruption.caught:
            self._status.dirty = self._status.dirty or self._replicas.updates.updated_apart()

    def report(self, report: StatusReported) -> StatusReported:
        replicas = self._replicas
        own_statistics = (
            replicas.attached and not replicas.equal_buffers and self._rollback.has_statistics(replicas.model)
        )
        report = replace(report, holds=self._holds(), own_statistics=own_statistics, rounds=self._rounds)
        report = replicas.updates.report_undo(report) if self._may_undo else report
        changed = report.updated or report.undoable
        return replace(report, undoes_exactly=replicas.updates.undoes_exactly) if changed else report

    def why_checkpoint(self, committed: int | None) -> str:
        rounded = self._rounded_before > (committed or 0)
        return "an update was undone with other roundings" if rounded else ""

    @property
    def _rounds(self) -> bool:
        """Whether messages are logged that an undo, which rounds, would not lead to again."""
        return self._pipelined and not self._by_layer and not self._replicas.updates.undoes_exactly

    @property
    def _may_undo(self) -> bool:
        """Whether the last completed iteration may be taken back.

        In the middle of an update no other worker could become equal by an undo; and what is undone is
        compared with a log, unless replicas become equal afterwards. Replicas of one whole model need no undo
        of a completed step: there are no others to wait for.
        """
        replicas, status = self._replicas, self._status
        by_others = replicas.attached or self._by_layer or replicas.updates.undoes_exactly
        waited_for = self._pipelined or replicas.sharded
        return by_others and waited_for and status.known and not status.updated

    def prepare(self, round: Round) -> None:
        self._warn_of_lost_statistics(round)
        task = round.task
        if task.load is not None:
            self._rounded_before = 0
        if task.undo or task.back:
            with recorder.span("undo", parameters=len(task.undo)):
                self._undo(task)

    def _warn_of_lost_statistics(self, round: Round) -> None:
        if (source := lost_statistics(round.plan, round.state.round.statuses).get(round.rank)) is not None:
            _logger.warning(
                "Worker %d loses its own running statistics (BatchNorm, or other buffers that steps change) "
                "and goes on with those of worker %d. With %s=True, DDP keeps them equal on all replicas, "
                "except in pipelines.",
                round.rank,
                source,
                BUFFER_SYNC,
                extra={"event": "statistics_lost"},
            )

    def _undo(self, task: Task) -> None:
        if task.undo and self._rounds:
            self._rounded_before = task.begin + 1
        if task.begin < self._status.iteration:  # it was completed, and counts as interrupted from here on
            self._rollback.back_to(task.begin)
            self._status.iteration, self._status.updated = task.begin, task.undo
        # The parameters are reported as updated until all replicas are equal: an undo rounds, so they are not
        # the original.
        self._replicas.updates.undo(task)
        self._rollback.undone()

    def join(self, round: Round) -> str | None:
        with recorder.span("reset replicas"):
            self._replicas.reset(round.plan.resume)
        with recorder.span("make replicas equal", transfers=len(round.plan.transfers)):
            return self._sync.apply_transfers(round.plan)
