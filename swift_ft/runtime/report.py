"""The report of a worker: the status of its state when a generation is over, and why a task failed."""

from __future__ import annotations

import logging
from dataclasses import replace

from swift_ft.checkpoint.step.rollback import Rollback
from swift_ft.config.worker_context import WorkerContext
from swift_ft.errors import CannotHelpError, DamagedCheckpointError, DivergenceError, SwiftError
from swift_ft.recovery.events import CheckpointDamaged, HelpDeclined, ReplayFailed, StatusReported
from swift_ft.runtime.memory.snapshots import Snapshots
from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.pipeline.worker_log import WorkerLog
from swift_ft.runtime.replicas.replicas import Replicas
from swift_ft.runtime.worker_status import WorkerStatus

__all__ = ["failure_event", "held_by", "status_report"]

_logger = logging.getLogger(__name__)


def held_by(
    pipeline: LoggedPipeline | None, replicas: Replicas, world_size: int, shards: str
) -> tuple[str, ...]:
    """Names of the parts that are on a worker. Workers that hold the same are replicas.

    Several workers may have a stage and be no replicas: with tensor parallelism each has another part of it.

    Args:
        pipeline: the worker's stages, if it has any.
        replicas: the replicas of its model. With neither, no other worker is known to hold the same.
        world_size: number of workers.
        shards: which shards of its model the worker has, in words; empty if nothing is sharded.
    """
    if pipeline is None and not replicas.attached:
        return ()
    if pipeline is not None and pipeline.shared_layers is not None:
        return tuple(f"layers of stage {stage}" for stage in pipeline.stages)
    parts = ("the model",) if pipeline is None else tuple(f"stage {stage}" for stage in pipeline.stages)
    if replicas.sharded:
        return tuple(f"{part}, {shards}" for part in parts)
    holders = world_size if pipeline is None else world_size // len({*pipeline.holders().values()})
    if replicas.count == holders:
        return parts
    return tuple(f"{part}'s part on worker {replicas.first}" for part in parts)


def status_report(
    context: WorkerContext,
    generation: int,
    status: WorkerStatus,
    *,
    live: bool,
    recovery_group: int,
    pipeline: LoggedPipeline | None,
    shards: str,
    replicas: Replicas,
    rollback: Rollback,
    log: WorkerLog,
    snapshots: Snapshots,
) -> StatusReported:
    """The report of a worker whose log is flushed.

    Args:
        context: the worker's place.
        generation: the generation that asks for reports.
        status: of the worker's state.
        live: False if the state is that of a replay that was interrupted.
        recovery_group: the group of the worker's machine.
        pipeline: the worker's stages, if it has any.
        shards: which shards of its model the worker has; empty if nothing is sharded.
        replicas: the replicas of its model, if there are any.
        rollback: knows whether steps change the model's buffers.
        snapshots: in its memory. They stay as they are from now on.
    """
    kept, held, held_of = snapshots.report()
    report = StatusReported(
        rank=context.rank,
        generation=generation,
        iteration=status.iteration if status.known else None,
        live=live,
        pipeline_known=True,
        dirty=status.dirty,
        holds=held_by(pipeline, replicas, context.world_size, shards),
        updated=status.updated,
        can_resend=False,
        group=recovery_group,
        steps=status.steps,
        kept=kept,
        held=held,
        held_of=held_of,
        parts_done=status.parts_done,
        own_statistics=replicas.attached
        and not replicas.equal_buffers
        and rollback.has_statistics(replicas.model),
    )
    shared = pipeline.shared_layers if pipeline is not None else None
    may_undo = (
        (replicas.attached or shared is not None or replicas.undoes_exactly)
        and status.known
        and not status.updated
    )
    if pipeline is None:
        # Replicas of one whole model need no undo of a completed step: there are no others to wait for.
        return replicas.report_undo(report) if may_undo and replicas.sharded else report
    # In the middle of an update no other worker could become equal by an undo; and what is undone is compared
    # with a log, unless replicas become equal afterwards.
    gap_before = log.gap_before(status.iteration)
    return replace(
        replicas.report_undo(report) if may_undo else report,
        stages=pipeline.stages,
        pipeline_known=pipeline.shapes_known,
        pipeline=pipeline.pipeline,
        can_resend=pipeline.can_resend(status.iteration - 1) and gap_before < status.iteration,
        max_replay_shards=pipeline.replay_shards.most,
        linked=pipeline.linked,
        log_gap_before=gap_before,
        log_gap_reason=log.why_gap,
        together=tuple(sorted(pipeline.script.together)),
        together_reason=pipeline.script.why,
        layers=pipeline.stack.count if pipeline.stack is not None else 0,
        completes=shared is not None and shared.completes(status.iteration) and not status.updated,
    )


def failure_event(
    error: SwiftError, rank: int, generation: int, unverified: int | None
) -> CheckpointDamaged | HelpDeclined | ReplayFailed:
    """Why a worker cannot do its task of a plan.

    Args:
        error: what happened.
        rank: the worker.
        unverified: the checkpoint that its state comes from, if no digest vouches for that one.
    """
    reason = str(error)
    if isinstance(error, DamagedCheckpointError):
        iteration = error.fields["iteration"]
        _logger.error("%s", reason, extra={"event": "checkpoint_damaged", "iteration": iteration})
        return CheckpointDamaged(rank=rank, generation=generation, iteration=iteration, reason=reason)
    if isinstance(error, CannotHelpError):
        return HelpDeclined(rank=rank, generation=generation, reason=reason)
    if not isinstance(error, DivergenceError):
        return ReplayFailed(rank=rank, generation=generation, reason=reason)
    return ReplayFailed(
        rank=rank,
        generation=generation,
        reason=reason,
        diverged=True,
        differs_at=error.fields.get("computed_in"),
        doubts=unverified,
    )
