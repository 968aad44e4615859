"""The parts of the model that are on a worker, by name."""

from __future__ import annotations

from swift_ft.runtime.pipeline.logged_pipeline import LoggedPipeline
from swift_ft.runtime.replicas.replicas import Replicas


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
