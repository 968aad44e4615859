"""Runs one seed of a kind of job. A seed is the same run every time."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from swift_ft.recovery.events import Event
from swift_ft.testing.simulation.job import Outcome, SimulatedJob
from swift_ft.testing.simulation.jobs.adjacent import AdjacentLossesJob
from swift_ft.testing.simulation.jobs.layered import LayeredJob
from swift_ft.testing.simulation.jobs.memory import MemoryJob
from swift_ft.testing.simulation.jobs.pipelines import PipelinesJob
from swift_ft.testing.simulation.jobs.replicated import ReplicatedJob
from swift_ft.testing.simulation.jobs.staged import StagedJob
from swift_ft.testing.simulation.jobs.worlds import (
    ReplicatedWorldsJob,
    SurvivingPipelinesJob,
    SurvivingShardsJob,
    SurvivorsJob,
    WorldsJob,
)
from swift_ft.testing.simulation.store import Violation


class JobKind(StrEnum):
    """The kind of a simulated job: its training, and its faults."""

    PIPELINE = "pipeline"
    """A pipeline with one stage per worker."""
    ADJACENT = "adjacent"
    """The same, with neighbouring machines lost at once."""
    REPLICATED = "replicated"
    """Data-parallel replicas of one model."""
    STAGED = "staged"
    """Pipelines of two stages that are each other's replicas."""
    MEMORY = "memory"
    """Workers that hold nothing twice, and copy their state to each other's memory."""
    LAYERED = "layered"
    """A pipeline whose layers move between its stages."""
    PIPELINES = "pipelines"
    """Two pipelines of a stack of layers, each layer's replicas wherever the cuts put them."""
    WORLDS = "worlds"
    """A pipeline that changes to other worlds: with more machines, fewer, or the same in other slots."""
    REPLICATED_WORLDS = "replicated-worlds"
    """The same with data-parallel replicas."""
    SURVIVORS = "survivors"
    """The same; after a loss, fewer replicas go on with the state of those that survive."""
    SURVIVING_PIPELINES = "surviving-pipelines"
    """Two pipelines of a stack of layers, which become unlike with each loss for which no machine comes."""
    SURVIVING_SHARDS = "surviving-shards"
    """Shards; after a loss, fewer workers go on with the copies that survivors have in memory."""
    BARE = "bare"
    """Scripts without a session, which can only be restarted."""


def make_job(
    kind: JobKind,
    seed: int,
    machines: int,
    workers: int = 1,
    *,
    trace: Callable[[str], None] | None = None,
) -> SimulatedJob:
    """A job that has not run yet; see :func:`simulate` for the arguments."""
    match kind:
        case JobKind.PIPELINE:
            return SimulatedJob(seed, machines, workers, trace=trace)
        case JobKind.ADJACENT:
            return AdjacentLossesJob(seed, machines, workers, trace=trace)
        case JobKind.REPLICATED:
            return ReplicatedJob(seed, machines, workers, trace=trace)
        case JobKind.STAGED:
            return StagedJob(seed, machines, workers, trace=trace)
        case JobKind.MEMORY:
            return MemoryJob(seed, machines, workers, trace=trace)
        case JobKind.LAYERED:
            return LayeredJob(seed, machines, workers, trace=trace)
        case JobKind.PIPELINES:
            return PipelinesJob(seed, machines, workers, trace=trace)
        case JobKind.WORLDS:
            return WorldsJob(seed, machines, workers, trace=trace)
        case JobKind.REPLICATED_WORLDS:
            return ReplicatedWorldsJob(seed, machines, workers, trace=trace)
        case JobKind.SURVIVORS:
            return SurvivorsJob(seed, machines, workers, trace=trace)
        case JobKind.SURVIVING_PIPELINES:
            return SurvivingPipelinesJob(seed, machines, workers, trace=trace)
        case JobKind.SURVIVING_SHARDS:
            return SurvivingShardsJob(seed, machines, workers, trace=trace)
        case JobKind.BARE:
            return SimulatedJob(seed, machines, workers, sessionless=True, trace=trace)


def simulate(
    kind: JobKind,
    seed: int,
    machines: int,
    workers: int = 1,
    *,
    heads: bool = False,
    trace: Callable[[str], None] | None = None,
    journal: list[Event] | None = None,
) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        machines: number of slots.
        workers: per machine.
        heads: events travel through heads, as in large jobs, and newcomers begin from snapshots.
        trace: called with each line of the run's journal, if given.
        journal: gets the events of the run, also of one that fails.

    Returns:
        How the run ended.

    Raises:
        Violation: when something happens that must never happen, with the command that shows this seed.
    """
    try:
        job = make_job(kind, seed, machines, workers, trace=trace)
        if heads:
            job.use_heads()
        try:
            return job.run()
        finally:
            if journal is not None:
                journal += job.events
    except Exception as error:
        options = f"--job {kind} --shape {machines}x{workers}{' --heads' * heads} --seed {seed}"
        command = f"python -m swift_ft.testing.simulation {options}"
        raise Violation(f"seed {seed}: {error}\nto see it: {command}") from error
