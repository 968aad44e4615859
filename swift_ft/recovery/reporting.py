"""What a worker says of itself when a generation is over: where it stands, and what it can do for others."""

from __future__ import annotations

from dataclasses import replace

from swift_ft.config import WorkerContext
from swift_ft.recovery.events import Reported
from swift_ft.recovery.exchange import Standing
from swift_ft.recovery.pipelined import LoggedPipeline
from swift_ft.recovery.replicated import Replicas

__all__ = ["parts_of", "report_of"]


def parts_of(pipeline: LoggedPipeline | None) -> tuple[str, ...]:
    """The parts whose whole state is on a worker; who holds the same is a replica."""
    if pipeline is None:
        return ("the model",)
    return tuple(f"stage {stage}" for stage in pipeline.stages)


def report_of(
    context: WorkerContext,
    generation: int,
    standing: Standing,
    *,
    live: bool,
    group: int,
    pipeline: LoggedPipeline | None,
    replicas: Replicas,
) -> Reported:
    """The report of a worker whose log is flushed.

    Args:
        context: its place.
        generation: that asks.
        standing: where its state stands.
        live: whether that is more than a replay that was broken off.
        group: of its machine.
        pipeline: its stages, if it has some.
        replicas: of its model, if it has some.
    """
    said = Reported(
        context.rank,
        generation,
        standing.iteration if standing.known else None,
        live=live,
        pipeline_known=True,
        dirty=standing.dirty,
        holds=parts_of(pipeline),
        updated=standing.updated,
        serves=False,
        group=group,
    )
    if pipeline is None:
        return said
    apart = replicas.attached and standing.known and not standing.updated  # else nobody could be equal
    return replace(
        said,
        stages=pipeline.stages,
        pipeline_known=pipeline.known,
        pipeline=pipeline.pipeline,
        undoable=replicas.undoable() if apart else (),
        serves=pipeline.serves(standing.iteration - 1),
        parts=pipeline.parts,
        linked=pipeline.tied.stages,
    )
